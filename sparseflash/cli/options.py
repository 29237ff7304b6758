"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def patterns_beginning_with(incomplete: str) -> list[str]:
    """Completions of the MASK argument in a shell.

    >>> patterns_beginning_with("cau")
    ['causal(']
    """
    from sparseflash import masks
    from sparseflash.cli.expression import public

    return [f"{name}(" for name, found in public(masks).items() if callable(found) and name.startswith(incomplete)]


def pattern_names(incomplete: str) -> list[str]:
    """Completions of a pattern's name in a shell.

    >>> pattern_names("cau")
    ['causal']
    """
    from sparseflash.cli.patterns import patterns

    return [name for name in patterns() if name.startswith(incomplete)]


_MASK = (
    "A Python expression of sparseflash.masks, such as 'local(4096, window=512) | butterfly(4096)', or a file written "
    "by convert or BlockMask.save."
)
Mask = Annotated[str, typer.Argument(metavar="MASK", help=_MASK, autocompletion=patterns_beginning_with)]
Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--from", metavar="FILE", help="Python file or module whose functions MASK may call; may be repeated."
    ),
]
HeadDim = Annotated[int, typer.Option(help="Head dim: features of a head.", min=1)]
Heads = Annotated[int, typer.Option(help="Query heads, if the mask is shared by all heads.", min=1)]
KVHeads = Annotated[int | None, typer.Option(help="Key and value heads.", show_default="as many as query heads", min=1)]
Precision = Literal["bf16", "fp16", "fp32"]
Backend = Literal["triton", "hopper", "blockwise", "reference"]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, ...", show_default="cuda if there is a GPU, else cpu")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
