"""Checks of the modules' arguments."""

from __future__ import annotations

from sparseflash.blockmask.arguments import integer


def check_at_least_one(**sizes: int) -> None:
    """Raises unless the sizes are positive integers; their names are for the message."""
    for name, size in sizes.items():
        if integer(size, name, "") < 1:
            raise ValueError(f"{name} must be at least 1; got {size}.")


def check_dropout(dropout: float) -> None:
    """Raises unless this is a probability below 1."""
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be at least 0 and below 1; got {dropout}.")
