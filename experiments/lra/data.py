"""Where a task's files lie, and its three splits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.lra import tokens
from experiments.lra.cache import Examples, open_examples
from experiments.lra.generate import LABEL, SPLITS


@dataclass(frozen=True)
class Task:
    """What a model must know of a task."""

    name: str
    vocabulary: int  # ids, with padding and [CLS]
    classes: int


@dataclass(frozen=True)
class Data:
    """The three splits of a task."""

    task: Task
    folder: Path
    generated: bool  # written by our generator, not the released files
    train: Examples
    val: Examples
    test: Examples


LISTOPS = Task("listops", tokens.VOCABULARY, 10)
TASKS = {LISTOPS.name: LISTOPS}

# The released archive nests its folders; a user may point at any of them.
LISTOPS_FOLDERS = (".", "listops-1000", "lra_release/listops-1000")


def load(task_name: str, folder: Path) -> Data:
    """Open a task's splits from a folder with the released or the generated files.

    Raises ValueError for an unknown task and FileNotFoundError, saying which files belong where.
    """
    if task_name not in TASKS:
        raise ValueError(f"the task must be one of {', '.join(TASKS)}; got {task_name!r}")
    place, prefix = find_listops(folder)
    train, val, test = (open_examples(place / f"{prefix}_{split}.tsv") for split in SPLITS)
    return Data(LISTOPS, place, prefix == "generated", train, val, test)


def find_listops(folder: Path) -> tuple[Path, str]:
    """The folder of the three files, and how their names begin: "basic" as released, or "generated"."""
    if not folder.is_dir():
        raise FileNotFoundError(f"the data folder {folder} does not exist; {ADVICE}")
    for place in (folder / name for name in LISTOPS_FOLDERS):
        for prefix in ("basic", "generated"):
            names = [f"{prefix}_{split}.tsv" for split in SPLITS]
            missing = [name for name in names if not (place / name).is_file()]
            if not missing:
                if prefix == "generated" and not (place / LABEL).is_file():
                    raise FileNotFoundError(f"{place} holds generated files without their {LABEL}; {ADVICE}")
                return place.resolve(), prefix
            if len(missing) < len(SPLITS):
                raise FileNotFoundError(f"{place} lacks {', '.join(missing)}; {ADVICE}")
    raise FileNotFoundError(f"the data folder {folder} holds no ListOps files; {ADVICE}")


ADVICE = (
    "place basic_train.tsv, basic_val.tsv and basic_test.tsv of the Long Range Arena release (its folder "
    "listops-1000) there, or write a set with `python -m experiments.lra generate` and pass the folder that "
    "it prints, or leave --data out and let `train` generate what it needs"
)
