"""The tasks: one module each, which finds and reads a task's files."""

from __future__ import annotations

from pathlib import Path

from experiments.lra.tasks import books_matching, image, listops, pathfinder, retrieval, text
from experiments.lra.tasks.task import Data, Options, Task

_MODULES = (listops, text, retrieval, books_matching, image)
TASKS: dict[str, Task] = {module.TASK.name: module.TASK for module in _MODULES} | pathfinder.TASKS


def load(name: str, folder: Path, options: Options = Options()) -> Data:  # noqa: B008 - it is frozen
    """Open a task's splits.

    The first call reads the files into `tokens/` beside them, for later runs to memory-map.
    """
    if name not in TASKS:
        raise ValueError(f"the task must be one of {', '.join(TASKS)}; got {name!r}")
    if name in pathfinder.TASKS:
        return pathfinder.load(TASKS[name], folder, options)
    module = next(module for module in _MODULES if name == module.TASK.name)
    return module.load(folder)
