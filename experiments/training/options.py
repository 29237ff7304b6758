from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from math import inf
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from experiments.training.settings import RunSettings, help_texts

Result = TypeVar("Result")


def option(settings: type, name: str) -> Any:
    """Omitting it differs from giving its default, which a preset may change."""
    (found,) = (each for each in fields(settings) if each.name == name)
    return typer.Option(help=found.metadata["help"], show_default=found.metadata["shown"])


Device = Annotated[str, option(RunSettings, "device")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Resume from the newest checkpoint in --out, with the run's settings.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a run that --out already holds.")]
PauseAfter = Annotated[
    float | None,
    typer.Option(
        help="Save and stop after this many minutes of this session; continue with --resume.", show_default="never"
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        help="File of measurements to write; a file of other seeds then holds means and deviations over all of them.",
        show_default="none",
    ),
]
LOCAL = ("--out", "--record", "--seed")  # not in the command of a record


def command_group(text: str) -> typer.Typer:
    return typer.Typer(help=text, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def settings_as_options(settings: type, *names: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """An option for each setting of a class, or only for `names`, instead of the argument `chosen`.

    `chosen` receives the given settings, by name.
    """
    hints = get_type_hints(settings)
    shared = {each.name for each in fields(RunSettings)}
    names = names or tuple(sorted(help_texts(settings), key=lambda name: name in shared))
    types = {name: hints[name] for name in names}

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        @wraps(command)
        def called(**values: Any) -> Result:
            given = {name: values.pop(name) for name in types}
            return command(chosen={name: value for name, value in given.items() if value is not None}, **values)

        hints = get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for each in inspect.signature(command).parameters.values():
            if each.name != "chosen":
                parameters.append(each.replace(annotation=hints[each.name]))
                continue
            for name, kind in types.items():
                annotation = Annotated[kind | None, option(settings, name)]  # type: ignore[valid-type]
                parameters.append(
                    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
                )
        keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
        called.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in keyword_only}
        return called

    return decorate


def deadline(pause_after: float | None) -> float:
    return inf if pause_after is None else time.monotonic() + 60 * pause_after


def folder_to_resume(out: Path | None, **given: object) -> Path:
    if any(value is not None and value is not False for value in given.values()):
        *names, last = (f"--{name}" for name in given)
        raise ValueError(f"--resume keeps the run's settings: leave out {', '.join(names)} and {last}")
    if out is None:
        raise ValueError("--resume needs --out, the folder of the run")
    return out
