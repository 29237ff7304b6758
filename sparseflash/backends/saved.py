"""The tensors that autograd saves in a forward, and every backend's backward takes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Saved(NamedTuple):
    """The inputs and results of a forward."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    kept: Tensor | None  # anything else that the backend's backward needs


def schema() -> str:
    """The arguments of `Saved` in a backward operator's schema.

    >>> schema()
    'Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor kept'
    """
    return ", ".join(f"Tensor {name}" for name in Saved._fields)
