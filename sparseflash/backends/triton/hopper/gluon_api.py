"""The differences between the versions of Triton's Gluon that the kernels run with, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import triton
from triton.experimental.gluon.language._core import (
    builtin,
    float32,
    inline_asm_elementwise,
    shared_memory_descriptor,
    tensor,
)
from triton.experimental.gluon.language.nvidia.hopper import tma

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

# Triton 3.9 has renamed both.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# Triton 3.6 has it under another name.
reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret

if hasattr(tma, "async_atomic_add"):
    async_add = tma.async_atomic_add
else:

    @builtin
    def async_add(tensor_desc, coord, src, _semantic=None):
        """Adds a box of shared memory to global memory."""
        from triton._C.libtriton import ir

        place = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, place, src.handle)


@builtin
def accumulator(products, _semantic=None):
    """The result of products that may still be in flight, as an accumulator for more products."""
    return tensor(products.handle, _tensor_type(products))


def _tensor_type(products: Any) -> Any:
    return getattr(products.type, "tensor_type", products.type)


@builtin
def local_mma_wait(products, pending, _semantic=None):
    """Waits until at most `pending` matrix instructions of this warpgroup are in flight; returns `products`.

    `warpgroup_mma_wait` also makes the warpgroups of a partition wait for one another (Triton 3.7 and later).
    """
    kind = _tensor_type(products)
    count = math.prod(kind.shape) // (32 * math.prod(kind.layout.warps_per_cta))
    in_place = ["=f"] * count + [str(i) for i in range(count)]
    return inline_asm_elementwise(
        f"wgmma.wait_group.sync.aligned {getattr(pending, 'value', pending)};", ",".join(in_place),
        [accumulator(products, _semantic=_semantic)], dtype=float32, is_pure=False, pack=count, _semantic=_semantic,
    )  # fmt: skip
