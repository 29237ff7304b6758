"""ListOps: nested expressions whose value is a digit, from `basic_{train,val,test}.tsv` or generated files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.lra.data.examples import Examples, Row, cached
from experiments.lra.data.listops import tokens
from experiments.lra.data.listops.generator import LABEL, SPLITS
from experiments.lra.data.listops.grammar import CLOSE, MIN
from experiments.lra.data.listops.values import operator_values
from experiments.lra.model.positions import Brackets
from experiments.lra.tasks.task import Data, Kinds, Task, has_all, need
from experiments.training.reading import read_json

BRACKETS = Brackets(opening=tuple(range(1 + MIN, 1 + CLOSE)), closing=(1 + CLOSE,))
TASK = Task("listops", tokens.VOCABULARY, 10, longest=2000, brackets=BRACKETS, token_classes=10)
_AT_ONCE = 1000  # expressions whose values are computed together

ROOTS = ("MIN", "MAX", "MED", "SM", "digit")  # a single digit has no operator

FOLDERS = (".", "listops-1000", "lra_release/listops-1000")

ADVICE = (
    "place basic_train.tsv, basic_val.tsv and basic_test.tsv of the Long Range Arena release (its folder "
    "listops-1000) there, or write a set with `python -m experiments.lra generate` and pass the folder that "
    "it prints, or leave --data out and let `train` generate what it needs"
)


def load(folder: Path) -> Data:
    place, prefix = find(folder)
    train, val, test = (open_file(place / f"{prefix}_{split}.tsv") for split in SPLITS)
    generated = prefix == "generated"
    origin = origin_of(place) if generated else "ListOps, released"

    def token_labels() -> Examples:
        path = place / f"{prefix}_{SPLITS[0]}.tsv"
        return cached(place, f"{path.stem}-values", [path], lambda: value_rows(train), shift=0, total=len(train))

    return Data(
        TASK,
        place,
        origin,
        generated,
        train,
        val,
        test,
        kinds=lambda: by_root(train, test),
        token_labels=token_labels,
    )


def value_rows(examples: Examples) -> Iterator[Row]:
    for first in range(0, len(examples), _AT_ONCE):
        some = examples.take(np.arange(first, min(first + _AT_ONCE, len(examples))))
        symbols = [some.sequence(row) for row in range(len(some))]
        ends = np.cumsum([len(each) for each in symbols])
        values = np.split(operator_values(np.concatenate(symbols) - 1), ends[:-1])
        for label, each in zip(some.labels.tolist(), values, strict=True):
            yield label, (each.tobytes(),)


def by_root(train: Examples, test: Examples) -> Kinds:
    trained, groups = root_groups(train), root_groups(test)
    right = []
    for group in range(len(ROOTS)):
        counts = np.bincount(train.labels[trained == group], minlength=TASK.classes)
        labels = test.labels[groups == group]
        right.append(float((labels == counts.argmax()).mean()) if len(labels) else 0.0)
    return Kinds("root operator", ROOTS, groups, {"root operator": tuple(right)})


def root_groups(examples: Examples) -> NDArray[np.int64]:
    groups = examples.first_symbols.astype(np.int64) - BRACKETS.opening[0]
    return np.where(groups < 0, len(ROOTS) - 1, groups)


def origin_of(place: Path) -> str:
    return f"ListOps, generated, seed {read_json(place / LABEL, 'the seed of generated data', 'seed')['seed']}"


def find(folder: Path) -> tuple[Path, str]:
    need(folder, ADVICE)
    for place in (folder / name for name in FOLDERS):
        for prefix in ("basic", "generated"):
            if has_all(place, [f"{prefix}_{split}.tsv" for split in SPLITS], ADVICE):
                if prefix == "generated" and not (place / LABEL).is_file():
                    raise FileNotFoundError(f"{place} holds generated files without their {LABEL}; {ADVICE}")
                return place.resolve(), prefix
    raise FileNotFoundError(f"the data folder {folder} holds no ListOps files; {ADVICE}")


def open_file(path: Path) -> Examples:
    return cached(path.parent, path.stem, [path], lambda: read(path), shift=0)


def read(path: Path) -> Iterator[Row]:
    with open(path, "rb") as file:
        header = file.readline().rstrip(b"\r\n")
        if header != b"Source\tTarget":
            raise ValueError(f"{path} must begin with the header Source<tab>Target; got {header[:60]!r}")
        for number, line in enumerate(file, start=2):
            try:
                source, target = line.rstrip(b"\r\n").split(b"\t")
                if len(target) != 1 or not target.isdigit():
                    raise ValueError(f"has the class {target!r} where one digit must stand")
                yield int(target), (tokens.encode(source),)
            except ValueError as error:
                raise ValueError(f"line {number} of {path} is not a ListOps example: {line[:60]!r}: {error}") from None
