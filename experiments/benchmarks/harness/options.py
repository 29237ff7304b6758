from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

Device = Annotated[str, typer.Option(help="cuda; or cpu, where kernels are interpreted: a test of the benchmark.")]
Commit = Annotated[str | None, typer.Option(help="The commit to note.", show_default="git's")]
Out = Annotated[Path, typer.Option(help="A .jsonl file, or the folder for it.")]
Rounds = Annotated[int, typer.Option(help="Turns of each way.", min=1)]
Minutes = Annotated[float | None, typer.Option(help="Begin nothing after so many.", show_default="no limit")]
Seed = Annotated[int, typer.Option(help="Of the inputs.")]

T = TypeVar("T")


def chosen(option: str, given: Iterable[T] | None, known: Iterable[T]) -> list[T]:
    known, given = list(known), list(given or ())
    if unknown := [value for value in given if value not in known]:
        raise typer.BadParameter(f"{option} must be from {', '.join(map(str, known))}; got {unknown[0]}.")
    return given or known


def deadline(minutes: float | None) -> Callable[[], bool]:
    """Whether the minutes from now on are over; None: never."""
    end = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    return lambda: time.monotonic() > end
