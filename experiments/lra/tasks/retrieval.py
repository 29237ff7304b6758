"""Retrieval: whether one paper cites the other, from the bytes of both texts (the released AAN pairs)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from experiments.lra.data.examples import Examples, Row, cached
from experiments.lra.tasks.task import Data, Task, has_all, need

TASK = Task("retrieval", 258, 2, towers=2, longest=4000)

FOLDERS = (".", "tsv_data", "lra_release/tsv_data", "lra_release/lra_release/tsv_data")
NAMES = tuple(f"new_aan_pairs.{split}.tsv" for split in ("train", "eval", "test"))
LABELS = {b"0.0": 0, b"1.0": 1}
ADVICE = (
    f"place {', '.join(NAMES)} of the Long Range Arena release (linked from google-research/long-range-arena; its "
    "folder lra_release/tsv_data) there"
)


def load(folder: Path) -> Data:
    need(folder, ADVICE)
    for place in (folder / name for name in FOLDERS):
        if has_all(place, NAMES, ADVICE):
            train, val, test = (open_file(place.resolve() / name) for name in NAMES)
            return Data(TASK, place.resolve(), "AAN, released", False, train, val, test)
    raise FileNotFoundError(f"the data folder {folder} holds no pairs of papers; {ADVICE}")


def open_file(path: Path) -> Examples:
    return cached(path.parent, path.stem, [path], lambda: read(path), shift=1)


def read(path: Path) -> Iterator[Row]:
    """A label, two ids, and the first 4,000 bytes of two texts; no header."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            fields = line.rstrip(b"\r\n").split(b"\t")
            if len(fields) != 5 or fields[0] not in LABELS or not fields[3] or not fields[4]:
                raise ValueError(
                    f"line {number} of {path} must be a label (0.0 or 1.0), two ids and two texts, with tabs between; "
                    f"got {len(fields)} fields: {line[:60]!r}"
                )
            yield LABELS[fields[0]], (fields[3][: TASK.longest], fields[4][: TASK.longest])
