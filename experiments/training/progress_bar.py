"""Progress: bars on a terminal, plain lines if the output goes to a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.training.run_log import Record

RATES = (("tokens_per_s", "tok/s"), ("images_per_s", "img/s"))  # the first in a record
STEPS, SECONDS = 100, 30  # a line after either, without a terminal


class TrainingBar:
    def __init__(self, console: Console, name: str, progress: Callable[[], float]) -> None:
        self.console, self.name, self._progress = console, name, progress
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            TextColumn("{task.percentage:3.0f}%  step {task.fields[step]}  {task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = TaskID(0)
        self._shown_at = 0.0  # time.monotonic()
        self._began = (0.0, 0.0)

    def __enter__(self) -> TrainingBar:
        self._bar.start()
        self._shown_at = time.monotonic()
        self._began = self._shown_at, self._progress()
        self._task = self._bar.add_task(self.name, total=1.0, step=0, numbers="")
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, record: Record) -> None:
        numbers = f"loss {record['loss']:.3f}"
        if "accuracy" in record:
            numbers += f" acc {record['accuracy']:.3f}"
        if record["kind"] != "train":
            self.console.print(f"{self.name} step {record['step']}  {record['kind']:5}  {numbers}")
            return
        rate, unit = next(rate for rate in RATES if rate[0] in record)
        numbers += f" {record[rate]:,.0f} {unit}"
        if "mfu" in record:
            numbers += f" MFU {record['mfu']:.1%}"
        self._bar.update(self._task, completed=min(1.0, self._progress()), step=record["step"], numbers=numbers)
        if self.console.is_terminal:
            return
        now = time.monotonic()
        if record["step"] % STEPS == 0 or now - self._shown_at >= SECONDS:
            self._shown_at = now
            self.console.print(f"{self.name} step {record['step']}  train  {numbers}{self._left(now)}")

    def _left(self, now: float) -> str:
        since, first = self._began
        done = min(1.0, self._progress())
        if done <= first:
            return ""
        seconds = round((now - since) * (1 - done) / (done - first))
        return f"  {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"


@contextmanager
def counting_bar(console: Console, name: str, total: int) -> Iterator[Callable[[int], None]]:
    shown_at = time.monotonic()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} / {task.total:,.0f}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(name, total=total)

        def show(done: int) -> None:
            nonlocal shown_at
            bar.update(task, completed=done)
            if not console.is_terminal and (now := time.monotonic()) - shown_at >= SECONDS:
                shown_at = now
                console.print(f"{name}: {done:,} of {total:,}")

        yield show
