from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import typer

Device = Annotated[str, typer.Option(help="cuda; or cpu, where kernels are interpreted: a test of the benchmark.")]
Commit = Annotated[str | None, typer.Option(help="The commit to note.", show_default="git's")]
Out = Annotated[Path, typer.Option(help="A .jsonl file, or the folder for it.")]
Cases = Annotated[str, typer.Option(help="Comma-separated globs over the names of the cases.")]
Rounds = Annotated[int, typer.Option(help="Turns of each way.", min=1)]
Minutes = Annotated[float | None, typer.Option(help="Begin nothing that may end later.", show_default="no limit")]
Seed = Annotated[int, typer.Option(help="Of the inputs.")]

T = TypeVar("T")


class Named(Protocol):
    @property
    def name(self) -> str: ...


Case = TypeVar("Case", bound=Named)


def chosen(option: str, given: Iterable[T] | None, known: Iterable[T]) -> list[T]:
    known, given = list(known), list(given or ())
    if unknown := [value for value in given if value not in known]:
        names = [str(value) for value in known]
        listed = (" | " if any("," in name for name in names) else ", ").join(names)
        raise typer.BadParameter(f"{option} must be from {listed}; got {unknown[0]}.")
    return given or known


def separated(*given: str) -> list[str]:
    """The values of a repeatable option, each split at commas."""
    return list(dict.fromkeys(name.strip() for each in given for name in each.split(",") if name.strip()))


def matching(patterns: str, cases: Iterable[Case]) -> list[Case]:
    """The cases whose names match one of the globs, which commas separate."""
    cases = list(cases)
    found = [case for case in cases if any(fnmatch(case.name, glob) for glob in separated(patterns))]
    if not found:
        names = ", ".join(case.name for case in cases) or "no cases"
        raise typer.BadParameter(f"--cases must match at least one of {names}; got {patterns!r}.")
    return found


def deadline(minutes: float | None) -> Callable[[], bool]:
    """Returns a function to call before each step: would the step end later than this many minutes from now?

    A step is assumed to take as long as the longest time between two calls so far. Without minutes: never.
    """
    last, longest = time.monotonic(), 0.0
    end = float("inf") if minutes is None else last + 60 * minutes

    def late() -> bool:
        nonlocal last, longest
        now = time.monotonic()
        last, longest = now, max(longest, now - last)
        return now + longest > end

    return late
