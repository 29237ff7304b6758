"""Prepares the launch of a kernel from arguments by name; layouts that compile to the same kernel share it.

Examples of tensors hold a layout but no memory of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.triton.launcher import Describe, Launch, Variant
from sparseflash.blockmask.cache import BoundedDict
from sparseflash.dropout import Dropout

# Examples of arguments that only some launches have.
SOME_PARTS = torch.empty(16, dtype=torch.float32, device="meta")
SOME_LENGTHS = torch.empty(2, 16, dtype=torch.int32, device="meta")
SOME_LIST = torch.empty(16, dtype=torch.int32, device="meta")
SOME_TIMES = torch.empty(16, dtype=torch.int64, device="meta")
SOME_SEED = torch.empty(1, dtype=torch.int64, device="meta")
SOME_COORDINATES = torch.empty(16, dtype=torch.int32, device="meta")

_variants = BoundedDict(512)


def of_call(lengths: Tensor | None, dropout: Dropout | None = None) -> dict[str, Any]:
    """The arguments for lengths and dropout, which are the same for all kernels of a call, by name."""
    found: dict[str, Any] = {}
    if lengths is not None:
        found |= {"lengths_ptr": lengths, "lengths_stride": lengths.stride(0)}
    if dropout is not None:
        found["seed_ptr"] = dropout.seed
        found |= {f"{name}_ptr": x for name, x in dropout.coordinates.items()}
    return found


def launch_of(
    function: Any, constants: Mapping[str, Any], numbers: Mapping[str, Any], examples: Mapping[str, Any],
    device: torch.device, described: Mapping[str, Describe], *, bound: Sequence[str], **options: Any,
) -> Launch:  # fmt: skip
    """A launch not bound to work. Layouts that Triton specialises on in the same way share its variant.

    Arguments that are neither constants, numbers, examples nor bound are None.
    """
    others = {*constants, *examples, *bound}
    fixed = {name: numbers.get(name) for name in function.arg_names if name not in others}
    key = (
        function.__name__, device, tuple(options.values()), tuple(constants.values()), tuple(described),
        tuple(examples), _dtypes(tuple(examples.values())),
        tuple([(name, tuple(_specialised(x)) if isinstance(x, tuple) else x is None) for name, x in fixed.items()]),
    )  # fmt: skip
    variant: Variant | None = _variants.get(key)
    if variant is None:
        variant = _variants.put(key, Variant(function, constants, device, **options))
    return Launch(variant, fixed, examples, described, bound=bound)


def _dtypes(x: tuple[Any, ...]) -> Any:
    """The dtypes of a tuple of tensors, or of tuples of them; None for other values."""
    return tuple([_dtypes(y) if isinstance(y, tuple) else getattr(y, "dtype", None) for y in x])


def _specialised(x: tuple[Any, ...]) -> list[Any]:
    """Triton may specialise on integers, such as strides, but not on floats."""
    found: list[Any] = []
    left: list[Any] = [x]
    while left:
        y = left.pop()
        if isinstance(y, tuple):
            found += "tuple", len(y)
            left += y
        else:
            found.append(float if isinstance(y, float) else y)
    return found


def strides_of(x: Tensor) -> tuple[int, ...]:
    """The strides of batch, head and token."""
    return x.stride()[:3]


def one_number_of(x: Tensor, device: torch.device) -> Tensor:
    """A one-element tensor expanded to the shape of `x`, a template for `torch.empty_like`. x: contiguous.

    `torch.empty` with a size and a dtype takes three times as long.
    """
    return torch.empty(1, dtype=x.dtype, device=device).expand(x.shape)


def like(x: Tensor) -> Tensor:
    """A tensor of the same layout on the meta device."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def empty_like(x: Tensor) -> Tensor:
    """A tensor with the layout of `torch.empty_like(x)`, on the meta device."""
    if torch.ops.aten.is_non_overlapping_and_dense(x):
        return like(x)
    return torch.empty_like(like(x))
