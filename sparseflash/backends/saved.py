"""What autograd saves of a forward, as the backward of every backend gets it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Saved(NamedTuple):
    """The inputs and results of a forward.

    Its fields, in this order, are arguments of the registered backward operators, after the gradients of out and lse.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    kept: Tensor | None  # what the backend's backward needs besides these; None: nothing


def schema() -> str:
    """The part of a backward operator's schema that is saved.

    >>> schema()
    'Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor kept'
    """
    return ", ".join(f"Tensor {name}" for name in Saved._fields)
