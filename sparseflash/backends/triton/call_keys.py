"""The keys of prepared calls: everything that their kernels depend on, but the values of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparseflash.backends.problem import Problem
from sparseflash.scores.change import Scores

if TYPE_CHECKING:  # `family` needs Triton, and this module must be importable without it
    from sparseflash.backends.triton.family import Setting


def key_of(setting: Setting, problem: Problem, *tensors: Tensor) -> tuple[Any, ...]:
    """Everything that a prepared call depends on, besides the plan and score modifications."""
    return (
        *setting[1:], problem.scale, problem.dropped, problem.kernels, tensors[0].dtype,
        *[(x.shape, x.stride(), x.data_ptr() % 16) for x in tensors],
    )  # fmt: skip


def key_of_changes(changes: Scores | None) -> tuple[Any, ...]:
    """The part of a key about score modifications: everything but the values of their tensors.

    The types are a part of it. `Scores.prepared` makes changes of other types from some, whose tensors it computes.
    """
    key: list[Any] = []
    for change in () if changes is None else changes.changes:
        key += type(change), change.numbers(), getattr(change, "identity", None)
        for x in change.tensors():
            key += x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16
    return tuple(key)
