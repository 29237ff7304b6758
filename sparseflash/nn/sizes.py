"""Checks of the modules' arguments."""

from __future__ import annotations


def check_dropout(dropout: float) -> None:
    """Raises unless this is a probability below 1."""
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be at least 0 and below 1; got {dropout}.")
