"""The description of a task, and of the data that its loader returns."""

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
    """What a model must know about a task. Id 0 is padding, and the last id is [CLS]."""

    name: str
    vocabulary: int  # number of ids, including padding and [CLS]
    classes: int
    towers: int = 1  # sequences per example; 2: both are encoded in the same way, and the head compares them
    longest: int = 0  # tokens that the published models see of a sequence
    side: int | None = None  # pixels along a side of a square image, which is stored in rows
    brackets: Brackets | None = None  # the brackets of expressions
    pixel_classes: int = 0  # classes of drawn pixels, for images whose generator may know them

    @property
    def cls(self) -> int:
        return self.vocabulary - 1


@dataclass(frozen=True)
class Kinds:
    """The test examples in groups on which the answers of a model, or of a rule, may depend."""

    by: str
    names: tuple[str, ...]
    of_test: NDArray[np.integer]  # [n], the group of each test example
    rules: dict[str, tuple[float, ...]]  # for rules that avoid the task, the accuracy in each group


@dataclass(frozen=True)
class Data:
    """The three splits of a task."""

    task: Task
    folder: Path
    origin: str  # the source of the examples, whatever their number and split
    generated: bool  # written by our generator, not the released files
    train: Examples
    val: Examples
    test: Examples
    shortcuts: Callable[[], list[tuple[str, float]]] = list  # rules that avoid the task, with their accuracies; slow
    kinds: Callable[[], Kinds] | None = None  # slow, too; None: nothing is known about the examples
    # The classes of the training images' pixels (pixel_labels.py), in the order of `train`; None if they are not known.
    pixel_labels: Callable[[], Examples] | None = None


@dataclass(frozen=True)
class Options:
    """A user's choices about the data of a task; each task uses those that apply to it."""

    difficulty: str = "hard"  # Pathfinder: easy, intermediate, hard
    split: str = "shuffled"  # Pathfinder: shuffled (S4, MEGA and most others) or ordered


def need(folder: Path, advice: str) -> None:
    """Raises FileNotFoundError, with advice on what belongs there, if the folder is missing."""
    if not folder.is_dir():
        raise FileNotFoundError(f"the data folder {folder} does not exist; {advice}")


def has_all(place: Path, names: Sequence[str], advice: str) -> bool:
    """Whether a folder holds these files; raises FileNotFoundError, with advice, if it holds only some of them."""
    missing = [name for name in names if not (place / name).is_file()]
    if 0 < len(missing) < len(names):
        raise FileNotFoundError(f"{place} lacks {', '.join(missing)}; {advice}")
    return not missing
