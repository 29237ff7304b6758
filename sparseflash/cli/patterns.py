"""The patterns of the library, by name, with their descriptions and calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from sparseflash import BlockMask, masks
from sparseflash.cli.expression import called, no_pattern, public


def patterns() -> dict[str, Callable[..., BlockMask]]:
    """The functions of sparseflash.masks that return a mask, by name.

    >>> "local" in patterns(), "pooled_scores" in patterns()  # pooled_scores returns scores of blocks
    (True, False)
    """
    return {
        name: found
        for name, found in sorted(public(masks).items())
        if inspect.isfunction(found) and found.__annotations__["return"] == "BlockMask"
    }


def sentence(pattern: Callable[..., BlockMask]) -> str:
    """The first paragraph of a pattern's docstring.

    >>> sentence(masks.causal)
    'Every query sees the keys up to its own position, by default aligned at the bottom right.'
    """
    return " ".join(inspect.getdoc(pattern).split("\n\n")[0].split())  # type: ignore[union-attr] # a test asks for it


def description(name: str) -> str:
    """How a pattern is called, and its whole docstring. Raises ValueError for an unknown name."""
    known = patterns()
    if name not in known:
        raise ValueError(no_pattern(name, known))
    return f"{called(name, known[name])}\n\n{inspect.getdoc(known[name])}"
