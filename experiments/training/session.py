from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from experiments.training.distributed import SINGLE, Ranks
from experiments.training.progress_bar import TrainingBar
from experiments.training.signals import stop_caught
from experiments.training.trainer import Pause, Trainer

Result = TypeVar("Result")


@contextmanager
def pausing(deadline: float) -> Iterator[Pause]:
    """Whether the deadline (time.monotonic()) has passed, or SIGTERM or Ctrl-C was received."""
    with stop_caught() as received:
        yield lambda step: received() or time.monotonic() > deadline


def train_shown(
    run: Trainer[Any], train: Callable[[], Result], console: Console, name: str, *, resumed: bool
) -> Result:
    if resumed:
        step = run.state.step
        console.print(f"{name} " + (f"goes on after step {step}" if step else "begins again: there was no checkpoint"))
    with TrainingBar(console, name, run.progress) as bar:
        run.listeners.append(bar.show)
        return train()


def print_resuming(console: Console, module: str, folder: Path, ranks: Ranks = SINGLE) -> None:
    program = ["python"] if ranks.count == 1 else ["torchrun", f"--nproc-per-node={ranks.count}"]
    command = shlex.join([*program, "-m", module, "train", "--resume", "--out", str(folder)])
    console.print(f"Go on with: {command}", soft_wrap=True)
