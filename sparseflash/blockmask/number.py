"""A scalar tensor that records whether its value was read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# These read only the shape, dtype or device of their first argument, not its value; and_masks calls new_ones.
_LIKE = {
    *(getattr(torch.Tensor, f"new_{name}") for name in ("zeros", "ones", "full", "empty", "tensor")),
    *(getattr(torch, f"{name}_like") for name in ("zeros", "ones", "full", "empty")),
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")),
}  # fmt: skip


class Number(Tensor):
    """A scalar int64 tensor whose `is_read` becomes true once anything reads its value.

    >>> head = Number(3)
    >>> head.new_ones(()), head.device, head.is_read
    (tensor(1), device(type='cpu'), False)
    >>> head < 5, head.is_read
    (tensor(True), True)

    It has no memory of its own: PyTorch can read the value only through `__torch_function__` or `__torch_dispatch__`.
    So a result computed while `is_read` is false is the same for all numbers.
    """

    is_read: bool
    value: Tensor

    @staticmethod
    def __new__(cls, number: int, device: torch.device | str = "cpu") -> Number:
        value = torch.tensor(number, dtype=torch.int64, device=device)
        made: Number = torch.Tensor._make_wrapper_subclass(cls, (), dtype=torch.int64, device=value.device)
        made.value, made.is_read = value, False
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LIKE and args and isinstance(args[0], Number):
            return func(args[0].value, *tree_map(_read, args[1:]), **tree_map(_read, kwargs or {}))
        return func(*tree_map(_read, args), **tree_map(_read, kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map(_read, args), **tree_map(_read, kwargs or {}))


def _read(x: Any) -> Any:
    if not isinstance(x, Number):
        return x
    x.is_read = True
    return x.value
