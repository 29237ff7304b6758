"""Evaluates the MASK argument."""

from __future__ import annotations

import inspect
import os
import sysconfig
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from sparseflash import BlockMask, masks
from sparseflash.cli.convert import read
from sparseflash.cli.refused import EXPRESSION, Refused
from sparseflash.cli.sources import Missing, module_of
from sparseflash.masks.other_names import OTHER_NAMES

_OWN = "For a function of yours: --from FILE.py."
_MADE_FROM = "BlockMask.from_dense takes boolean tensors, BlockMask.from_function rules on positions"
_RULE = "A rule on positions becomes a mask by 'BlockMask.from_function(rule, 4096)'."
_PACKAGE = Path(__file__).resolve().parents[1]


def mask_of(
    text: str, sources: Sequence[str] = (), *, names: Mapping[str, Any] | None = None, hint: str | None = None
) -> BlockMask:
    """The mask of an expression or of a file.

    >>> mask_of("local(1024, window=256) & causal(1024)")
    BlockMask(1024 x 1024, blocks of 128, 15 tiles: 0 full + 15 partial (2 distinct), density 11.8 %)

    Raises Refused if the text does not give a mask; errors inside the user's own functions propagate unchanged.
    """
    if is_file(text):
        if Path(text).suffix == ".py":
            raise Refused(
                f"{text} must be a mask or a file of one; for a function in it: 'function(4096)' --from {text}"
            )
        try:
            return read(Path(text))
        except (ValueError, OSError) as error:
            raise Refused(str(error)) from None
    known = {"BlockMask": BlockMask, "torch": torch, "masks": masks, **public(masks), **(names or {})}
    own: dict[str, Any] = {}
    for source in sources:
        try:
            own |= public(module_of(source))
        except Missing as error:
            raise Refused(str(error)) from None
    known |= own
    try:
        code = compile(text, EXPRESSION, "eval")
    except SyntaxError as error:
        if looks_like_a_file(text):
            raise Refused(f"there is no file {text}") from None
        raise Refused(
            f"the mask must be an expression such as local(4096, window=512), or a file; got {text!r} ({error.msg})"
        ) from None
    try:
        found = eval(code, known)
    except NameError as error:
        if not raised_here(error):
            raise
        if looks_like_a_file(text):
            raise Refused(f"there is no file {text}") from None
        raise Refused(unknown(str(error.name), own, hint or _OWN)) from None
    except Exception as error:
        if not raised_here(error):
            raise
        rule = f". {_RULE}" if own and isinstance(error, TypeError) and "missing" in str(error) else ""
        raise Refused(f"{text}: {error}{rule}") from None
    if inspect.isfunction(found):
        if text in own and len(needed(found)) > 1:
            raise Refused(f"{text} must give a BlockMask; got a function of ({', '.join(needed(found))}). {_RULE}")
        raise Refused(f"{text} must be called, as {called(text, found)}, in quotes")
    if not isinstance(found, BlockMask):
        raise Refused(f"{text} must give a BlockMask; got {type(found).__name__} ({_MADE_FROM})")
    return found


def called(name: str, function: Callable[..., Any]) -> str:
    """The call of a function, without the types of its arguments.

    >>> called("masks.causal", masks.causal)
    'masks.causal(q_len, k_len=None, *, offset=None, block=128)'
    """
    signature = inspect.signature(function)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return f"{name}{signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)}"


def needed(function: Callable[..., Any]) -> list[str]:
    """The arguments that a function must be given by their places."""
    parameters = inspect.signature(function).parameters.values()
    return [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]


def is_file(text: str) -> bool:
    """An expression may exceed the file system's limit on names, which raises OSError."""
    try:
        return Path(text).is_file()
    except OSError:
        return False


def looks_like_a_file(text: str) -> bool:
    """Whether the text can only be meant as a path: no pattern is called in it, and it has a folder or a suffix."""
    return "(" not in text and (os.sep in text or Path(text).suffix != "")


def unknown(name: str, own: Mapping[str, Any], hint: str) -> str:
    """The message for a name that neither the library nor the user's files have."""
    patterns = {each for each, found in public(masks).items() if callable(found)}
    mine = sorted(each for each, found in own.items() if inspect.isfunction(found))
    files = f"The files of --from have {', '.join(mine) or 'no function'}." if own else hint
    return f"{no_pattern(name, patterns, mine)} {files}"


def no_pattern(name: str, patterns: Collection[str], mine: Sequence[str] = ()) -> str:
    """The message for an unknown pattern, with its name in this library or similar names."""
    if name in OTHER_NAMES:
        return f"no pattern is called {name}; use {OTHER_NAMES[name]}."
    near = get_close_matches(name, [*mine, *patterns], n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(patterns))}."
    return f"no pattern is called {name}; {hint}"


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
