"""A training run on the terminal: its progress bar, TensorBoard, and the end of the session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from rich.console import Console

from experiments.training.progress_bar import TrainingBar
from experiments.training.signals import sigterm_caught
from experiments.training.tensorboard import TensorBoardLog
from experiments.training.trainer import Pause, Trainer

Result = TypeVar("Result")


@contextmanager
def pausing(deadline: float) -> Iterator[Pause]:
    """Yields the condition for pausing runs: a deadline, by time.monotonic(), has passed or SIGTERM was received."""
    with sigterm_caught() as received:
        yield lambda step: received() or time.monotonic() > deadline


def train_shown(
    run: Trainer[Any], train: Callable[[], Result], console: Console, name: str, *, tensorboard: bool, resumed: bool
) -> Result:
    """Call `train` of a run, with a progress bar of this name and, if wanted, with its log in TensorBoard's files."""
    with ExitStack() as stack:
        run.listeners.append(stack.enter_context(TrainingBar(console, name, run.progress)).show)
        if tensorboard and run.ranks.first:
            resumed_at = run.state.step if resumed else None
            run.listeners.append(stack.enter_context(TensorBoardLog(run.folder, resumed_at)).show)
        return train()
