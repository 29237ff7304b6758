"""The output and the errors of all commands."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from traceback import print_exception
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparseflash import BlockMask, __version__
from sparseflash.cli.expression import EXPRESSION, Refused, mask_of

console = Console()
progress = Console(stderr=True)


def say_json(found: dict[str, Any]) -> None:
    """Prints one JSON object, without any decoration."""
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


def say_table(rows: Iterable[tuple[str, str]]) -> None:
    """Prints labels and texts in two columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for what, much in rows:
        table.add_row(what, Text(much))
    console.print(table)


def say(*lines: str) -> None:
    """Prints lines that only a narrow terminal wraps, without markup or highlighting."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def asked(text: str, sources: list[str] | None) -> BlockMask:
    """The mask on the command line.

    Errors in the expression are reported in one line; errors in the user's functions keep their traceback from the
    expression on.
    """
    try:
        return mask_of(text, sources or ())
    except Refused as error:
        refuse(error)
        raise typer.Exit(2) from error
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != EXPRESSION:
            trace = trace.tb_next
        if trace is None:
            raise
        print_exception(type(error), error, trace)
        raise typer.Exit(1) from error


def place(device: str | None) -> torch.device:
    """The device that was named, or the default one."""
    refused = ValueError(f"--device must be cpu or cuda, such as cuda:1; got {device}")
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise refused from error
    if chosen.type not in ("cpu", "cuda"):
        raise refused
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device} needs a GPU; PyTorch sees none")
    if chosen.type == "cuda" and chosen.index is not None:
        torch.cuda.set_device(chosen)  # timers synchronise with the current device
    return chosen


def where(mask: BlockMask) -> str:
    """The device and versions that a result was obtained with."""
    name = f"{platform.machine()} CPU, {threads()}"
    if mask.device.type == "cuda":
        name = torch.cuda.get_device_name(mask.device)
    return f"{name}, torch {torch.__version__}, sparseflash {__version__}"


def threads() -> str:
    """How many threads PyTorch computes with on the CPU."""
    number = torch.get_num_threads()
    return f"{number} thread{'' if number == 1 else 's'}"


@contextmanager
def short_errors() -> Iterator[None]:
    """Reports the library's errors in one line; no code of the user's runs inside."""
    try:
        yield
    except (ValueError, TypeError, ImportError, OSError, RuntimeError) as error:
        refuse(error)
        raise typer.Exit(2) from error


def refuse(error: Exception) -> None:
    """Prints one line on standard error."""
    Console(stderr=True).print(Text.assemble(("Error: ", "red"), str(error)), soft_wrap=True)
