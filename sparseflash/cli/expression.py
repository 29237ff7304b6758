"""Evaluates the MASK argument."""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from sparseflash import BlockMask, masks
from sparseflash.cli.convert import read
from sparseflash.cli.sources import Missing, module_of


class Refused(ValueError):
    """The MASK argument does not give a mask."""


HELP = (
    "A Python expression of sparseflash.masks, such as 'local(4096, window=512) | butterfly(4096)', or a file written "
    "by convert or BlockMask.save."
)
_EXPRESSION = "<mask>"  # the file name of the expression's code
_PACKAGE = Path(__file__).resolve().parents[1]


def mask_of(text: str, sources: Sequence[str] = ()) -> BlockMask:
    """The mask of an expression or of a file.

    >>> mask_of("local(1024, window=256) & causal(1024)")
    BlockMask(1024 x 1024, blocks of 128, 15 tiles: 0 full + 15 partial (2 distinct), density 11.8 %)

    text: a path, or an expression of the functions of sparseflash.masks, `BlockMask`, `torch` and the names in
    `sources`. sources: Python files, or modules, whose public names the expression may use.

    Raises Refused if the text does not give a mask; errors inside the user's own functions propagate unchanged.
    """
    if is_file(text):
        try:
            return read(Path(text))
        except (ValueError, OSError) as error:
            raise Refused(str(error)) from None
    names = {"BlockMask": BlockMask, "torch": torch, "masks": masks, **public(masks)}
    for source in sources:
        try:
            names |= public(module_of(source))
        except Missing as error:
            raise Refused(str(error)) from None
    try:
        code = compile(text, _EXPRESSION, "eval")
    except SyntaxError:
        raise Refused(
            f"the mask must be an expression such as local(4096, window=512), or a file; got {text!r}"
        ) from None
    try:
        found = eval(code, names)
    except NameError as error:
        if not raised_here(error):
            raise
        near = get_close_matches(str(error.name), names, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(sorted(public(masks)))}"
        raise Refused(f"no pattern is called {error.name}{hint}") from None
    except Exception as error:
        if not raised_here(error):
            raise
        raise Refused(f"{text}: {error}") from None
    if inspect.isfunction(found):
        raise Refused(f"{text} must be called, with {inspect.signature(found)}")
    if not isinstance(found, BlockMask):
        raise Refused(f"{text} must give a BlockMask; got {type(found).__name__}")
    return found


def is_file(text: str) -> bool:
    """Whether the text names a file. An expression may exceed the file system's limit on names, which raises
    OSError.
    """
    try:
        return Path(text).is_file()
    except OSError:
        return False


def public(module: ModuleType) -> dict[str, Any]:
    """The public names of a module."""
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    return {name: getattr(module, name) for name in names}


def raised_here(error: Exception) -> bool:
    """Whether an error comes from the expression or a library, not from the user's own code."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {Path(sysconfig.get_path(name)).resolve() for name in names}
    folders |= {Path(torch.__file__).resolve().parent, Path(masks.__file__).resolve().parent, _PACKAGE}
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<") and not any(Path(file).resolve().is_relative_to(folder) for folder in folders):
            return False
        trace = trace.tb_next
    return True
