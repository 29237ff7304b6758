from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

_ABOUT_PATHS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


@contextmanager
def short_errors() -> Iterator[None]:
    """Errors that the user can correct in one line, others with their traceback. The exit code is 2; 1 for a diverged
    training."""
    try:
        yield
    except (ValueError, *_ABOUT_PATHS, FloatingPointError) as error:
        rank = os.environ.get("RANK", "0")
        who = "" if rank == "0" else f"process {rank}: "
        Console(stderr=True).print(Text.assemble((f"{who}Error: ", "red"), str(error)), soft_wrap=True)
        raise typer.Exit(1 if isinstance(error, FloatingPointError) else 2) from error
