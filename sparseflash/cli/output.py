"""The output and the errors of all commands."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from traceback import print_exception
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparseflash import __version__
from sparseflash.cli.names import PICTURES
from sparseflash.cli.refused import EXPRESSION, Refused

# PyTorch is imported when it is needed, because help should appear at once.
if TYPE_CHECKING:
    import torch

    from sparseflash import BlockMask

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
    """The mask on the command line."""
    from sparseflash.cli.expression import mask_of

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
    import torch

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
        torch.cuda.set_device(chosen)
    return chosen


def where(mask: BlockMask) -> str:
    """The device and versions that a result was obtained with."""
    import torch

    name = f"{platform.machine()} CPU, {threads()}"
    if mask.device.type == "cuda":
        name = torch.cuda.get_device_name(mask.device)
    return f"{name}, torch {torch.__version__}, sparseflash {__version__}"


def threads() -> str:
    """How many threads PyTorch computes with on the CPU."""
    import torch

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


def check_picture(path: Path) -> None:
    """Raises ValueError for a picture that could not be written: another format, no matplotlib, no such folder."""
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"--picture must be a file called {', '.join(PICTURES)}; got {path}")
    check_folder(path, "--picture")
    if find_spec("matplotlib") is None:
        raise ValueError("--picture needs matplotlib: pip install 'sparseflash[plot]'")


def check_folder(path: Path | None, option: str) -> None:
    """Raises ValueError unless the file's folder exists, or there is no file to write."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{option} must be in a folder that exists; got {path}")
