"""Checks of options that may be repeated, for experiments.benchmarks.blocks, too."""

from __future__ import annotations

from collections.abc import Collection

import typer

from experiments.benchmarks.tune.space import parse
from sparseflash.backends.triton.configs import Config


def check_choices(name: str, given: Collection[object] | None, allowed: Collection[object]) -> None:
    """Raises typer.BadParameter if a value of the option is not allowed."""
    for value in given or ():
        if value not in allowed:
            raise typer.BadParameter(f"--{name} must be one of {', '.join(map(str, allowed))}; got {value}")


def configs_of(given: Collection[str] | None) -> list[Config]:
    """The configurations given by --config; raises typer.BadParameter for text that is not a configuration."""
    try:
        return [parse(each) for each in given or ()]
    except ValueError as failure:
        raise typer.BadParameter(f"--config: {failure}") from None
