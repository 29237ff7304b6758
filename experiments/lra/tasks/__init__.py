"""The tasks: one module each, which finds and reads a task's files."""

from __future__ import annotations

from pathlib import Path

from experiments.lra.tasks import books_matching, image, listops, pathfinder, retrieval, text
from experiments.lra.tasks.task import Data, Options, Task

_BY_NAME = {module.TASK.name: module for module in (listops, text, retrieval, books_matching, image)}
TASKS: dict[str, Task] = {name: module.TASK for name, module in _BY_NAME.items()} | pathfinder.TASKS


def load(name: str, folder: Path, options: Options = Options()) -> Data:  # noqa: B008 - it is frozen
    """Open a task's splits.

    The first call reads the files into `tokens/` beside them, for later runs to memory-map.
    """
    if name not in TASKS:
        raise ValueError(f"the task must be one of {', '.join(TASKS)}; got {name!r}")
    if name in pathfinder.TASKS:
        return pathfinder.load(TASKS[name], folder, options)
    return _BY_NAME[name].load(folder)


def advice(name: str) -> str:
    """Where a task's files come from, and what to pass."""
    return pathfinder.advice(TASKS[name]) if name in pathfinder.TASKS else _BY_NAME[name].ADVICE
