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
    """Id 0 is padding, and the last id is [CLS]."""

    name: str
    vocabulary: int
    classes: int
    towers: int = 1  # sequences per example
    longest: int = 0  # of a sequence that published models see
    side: int | None = None  # pixels
    brackets: Brackets | None = None
    token_classes: int = 0  # of tokens that have a class beside the answer

    @property
    def cls(self) -> int:
        return self.vocabulary - 1


@dataclass(frozen=True)
class Kinds:
    by: str
    names: tuple[str, ...]
    of_test: NDArray[np.integer]  # [n]
    rules: dict[str, tuple[float, ...]]  # accuracy in each group


@dataclass(frozen=True)
class Data:
    task: Task
    folder: Path
    origin: str
    generated: bool  # not the released files
    train: Examples
    val: Examples
    test: Examples
    shortcuts: Callable[[], list[tuple[str, float]]] = list  # accuracies; slow
    kinds: Callable[[], Kinds] | None = None  # slow, too
    # A class of each token, NO_CLASS for none, in the order of `train`; None if unknown.
    token_labels: Callable[[], Examples] | None = None


@dataclass(frozen=True)
class Options:
    difficulty: str = "hard"  # Pathfinder: easy, intermediate, hard
    split: str = "shuffled"  # Pathfinder: shuffled (S4, MEGA and most others) or ordered


def need(folder: Path, advice: str) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"the data folder {folder} does not exist; {advice}")


def has_all(place: Path, names: Sequence[str], advice: str) -> bool:
    missing = [name for name in names if not (place / name).is_file()]
    if 0 < len(missing) < len(names):
        raise FileNotFoundError(f"{place} lacks {', '.join(missing)}; {advice}")
    return not missing
