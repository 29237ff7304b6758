"""The description of a task, and of its data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.lra.data.examples import Examples
from experiments.lra.model.positions import Brackets


@dataclass(frozen=True)
class Task:
    """The facts about a task that a model needs. Id 0 is padding, and the last id is [CLS]."""

    name: str
    vocabulary: int  # number of ids, including padding and [CLS]
    classes: int
    towers: int = 1  # sequences per example; 2: both are encoded in the same way, and the head compares them
    longest: int = 0  # tokens of a sequence that published models see
    side: int | None = None  # pixels along a side of a square image, which is stored in rows
    brackets: Brackets | None = None  # the brackets of expressions
    pixel_classes: int = 0  # classes of drawn pixels, for images from a generator

    @property
    def cls(self) -> int:
        return self.vocabulary - 1


@dataclass(frozen=True)
class Kinds:
    """Groups of the test examples that may affect accuracy."""

    by: str
    names: tuple[str, ...]
    of_test: NDArray[np.integer]  # [n], the group of each test example
    rules: dict[str, tuple[float, ...]]  # the accuracy of each baseline rule in each group


@dataclass(frozen=True)
class Data:
    task: Task
    folder: Path
    origin: str  # the source of the examples, for any number and split
    generated: bool  # generated, not the released files
    train: Examples
    val: Examples
    test: Examples
    shortcuts: Callable[[], list[tuple[str, float]]] = list  # baseline rules with their accuracies; slow
    kinds: Callable[[], Kinds] | None = None  # slow too; None if the examples have no groups
    # The classes of the training images' pixels (pixel_labels.py), in the order of `train`; None if unknown.
    pixel_labels: Callable[[], Examples] | None = None


@dataclass(frozen=True)
class Options:
    """A user's choices about the data of a task; each task uses the applicable ones."""

    difficulty: str = "hard"  # Pathfinder: easy, intermediate, hard
    split: str = "shuffled"  # Pathfinder: shuffled (S4, MEGA and most others) or ordered


def need(folder: Path, advice: str) -> None:
    """Raises FileNotFoundError, with advice on the expected contents, if the folder is missing."""
    if not folder.is_dir():
        raise FileNotFoundError(f"the data folder {folder} does not exist; {advice}")


def has_all(place: Path, names: Sequence[str], advice: str) -> bool:
    """Whether a folder holds these files; raises FileNotFoundError, with advice, if it holds only some."""
    missing = [name for name in names if not (place / name).is_file()]
    if 0 < len(missing) < len(names):
        raise FileNotFoundError(f"{place} lacks {', '.join(missing)}; {advice}")
    return not missing
