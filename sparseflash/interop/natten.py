"""NATTEN's functions, with its arguments and layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.attention import Backend, attention
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, block_pair, dense_tensor
from sparseflash.blockmask.cache import bounded_tensors
from sparseflash.blockmask.compiling import constant_when_compiled
from sparseflash.blockmask.ops.place import place
from sparseflash.interop.tokens_first import refuse_unless
from sparseflash.inverse_gradient import apply_with_inverse
from sparseflash.masks import order as orders
from sparseflash.masks.neighborhood import neighborhood
from sparseflash.masks.tiling.grid import coordinates, per_axis, strides

_KERNELS = ("cutlass-fna", "hopper-fna", "blackwell-fna", "flex-fna")  # NATTEN's backends

PerAxis = int | Sequence[int] | None
Flags = bool | Sequence[bool] | None
_KERNEL_CHOICES = (
    "attention_kwargs", "q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape",
    "backward_kv_splits", "backward_use_pt_reduction", "run_persistent_kernel", "kernel_schedule", "torch_compile",
)  # fmt: skip


def na1d(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: PerAxis, stride: PerAxis = 1, dilation: PerAxis = 1,
    is_causal: Flags = False, scale: float | None = None, additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None, *, return_lse: bool = False, block: Block = 128,
    backend: Backend | None = None, **others: Any,
) -> Any:  # fmt: skip
    """`natten.na1d`: neighbourhood attention on a sequence, `[B, N, H, D]`. Arguments as of `na2d`.

    >>> q, k, v = torch.randn(3, 1, 100, 2, 16)
    >>> na1d(q, k, v, kernel_size=7, is_causal=True).shape
    torch.Size([1, 100, 2, 16])
    """
    given = (kernel_size, stride, dilation, is_causal, scale, additional_keys, additional_values)
    return _neighborhood(1, query, key, value, *given, return_lse, block, backend, others)


def na2d(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: PerAxis, stride: PerAxis = 1, dilation: PerAxis = 1,
    is_causal: Flags = False, scale: float | None = None, additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None, *, return_lse: bool = False, block: Block = 128,
    backend: Backend | None = None, **others: Any,
) -> Any:  # fmt: skip
    """`natten.na2d`: neighbourhood attention on an image, computed by `attention` under `masks.neighborhood`.

    >>> q, k, v = torch.randn(3, 1, 24, 24, 2, 16)  # [B, height, width, H, D]
    >>> na2d(q, k, v, kernel_size=(7, 7), dilation=(1, 2), is_causal=(True, False)).shape
    torch.Size([1, 24, 24, 2, 16])

    With text beside the image, which every token sees:

    >>> text = torch.randn(1, 10, 2, 16)
    >>> na2d(q, k, v, kernel_size=7, additional_keys=text, additional_values=text).shape
    torch.Size([1, 24, 24, 2, 16])

    Args:
        query: `[B, *grid, Hq, D]`. key, value: `[B, *grid, Hkv, D]` and `[B, *grid, Hkv, Dv]`, Hq a multiple of Hkv.
        kernel_size, stride, dilation: tokens, one number or one for each axis.
        is_causal: a bool, or one for each axis.
        additional_keys, additional_values: `[B, L, Hkv, D]` and `[B, L, Hkv, Dv]`.
        return_lse: also return lse, `[B, *grid, Hq]`.
        scale, block, backend: as for `sdpa`.

    The mask is made once for each shape and set of options, and kept. If it has fewer live tiles so, tokens are
    reordered into tiles of the grid, by one operation for each of q, k, v and the result.

    NATTEN's choices of kernels and tiles, such as `q_tile_shape` and `backend="cutlass-fna"`, change nothing.
    """
    given = (kernel_size, stride, dilation, is_causal, scale, additional_keys, additional_values)
    return _neighborhood(2, query, key, value, *given, return_lse, block, backend, others)


def na3d(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: PerAxis, stride: PerAxis = 1, dilation: PerAxis = 1,
    is_causal: Flags = False, scale: float | None = None, additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None, *, return_lse: bool = False, block: Block = 128,
    backend: Backend | None = None, **others: Any,
) -> Any:  # fmt: skip
    """`natten.na3d`: neighbourhood attention on a video, `[B, frames, height, width, H, D]`. Arguments as of `na2d`.

    >>> q, k, v = torch.randn(3, 1, 4, 8, 8, 2, 16)
    >>> na3d(q, k, v, kernel_size=(3, 5, 5), is_causal=(True, False, False)).shape
    torch.Size([1, 4, 8, 8, 2, 16])
    """
    given = (kernel_size, stride, dilation, is_causal, scale, additional_keys, additional_values)
    return _neighborhood(3, query, key, value, *given, return_lse, block, backend, others)


def _neighborhood(
    axes: int, query: Tensor, key: Tensor, value: Tensor, kernel_size: Any, stride: Any, dilation: Any, is_causal: Any,
    scale: float | None, more_keys: Tensor | None, more_values: Tensor | None, return_lse: bool, block: Block,
    backend: Backend | None, others: dict[str, Any],
) -> Any:  # fmt: skip
    for name in others:
        if name not in _KERNEL_CHOICES:
            raise TypeError(f"na{axes}d got an argument that NATTEN does not have, {name!r}.")
    if backend in _KERNELS:
        backend = None
    for name, x in (("query", query), ("key", key), ("value", value)):
        letters = ("N", "height, width", "frames, height, width")[axes - 1]
        if dense_tensor(x, name).ndim != axes + 3 or x.shape[:-2] != query.shape[:-2]:
            raise ValueError(
                f"{name} must have shape [B, {letters}, heads, head dim], with the batch and grid of query, "
                f"{list(query.shape[:-2])}; got {list(x.shape)}."
            )
    refuse_unless(
        (more_keys is None) == (more_values is None), "additional_keys and additional_values", "given together",
        "one of them",
    )  # fmt: skip
    for name, added, own in (("additional_keys", more_keys, key), ("additional_values", more_values, value)):
        if added is None:
            continue
        batch, heads, dim = len(own), *own.shape[-2:]
        if dense_tensor(added, name).ndim != 4 or (added.shape[0], *added.shape[2:]) != (batch, heads, dim):
            raise ValueError(f"{name} must have shape [{batch}, L, {heads}, {dim}]; got {list(added.shape)}.")
        if (added.dtype, added.device) != (own.dtype, own.device):  # torch.cat would promote the dtype
            raise ValueError(
                f"{name} must have the dtype and device of key and value, {own.dtype} and {own.device}; got "
                f"{added.dtype} and {added.device}."
            )
    grid = tuple(query.shape[1:-2])
    rule = (
        per_axis(kernel_size, grid, "kernel_size", "keys"),
        per_axis(1 if stride is None else stride, grid, "stride", "tokens"),
        per_axis(1 if dilation is None else dilation, grid, "dilation", "tokens"),
        tuple(is_causal) if isinstance(is_causal, Sequence) else (bool(is_causal),) * axes,
    )
    for side, size, step, gap in zip(grid, *rule[:3]):
        if size * gap > side or step > size:
            raise ValueError(
                f"kernel_size * dilation must be at most the side of the grid, and stride at most kernel_size; got "
                f"kernel_size {size}, dilation {gap} and stride {step} on a side of {side}."
            )
    more = 0 if more_keys is None else more_keys.shape[1]
    make = _made if torch.compiler.is_compiling() else _kept
    mask, order, back = make(grid, *rule, more, block, query.device)
    q, k, v = (_ordered(x.flatten(1, axes), order, back) for x in (query, key, value))
    if more_keys is not None and more_values is not None:
        k, v = torch.cat([k, more_keys], dim=1), torch.cat([v, more_values], dim=1)
    out, lse = attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, scale=scale, return_lse=True, backend=backend
    )
    out = _ordered(out.transpose(1, 2), back, order).unflatten(1, grid)
    return (out, _ordered(lse.transpose(1, 2), back, order).unflatten(1, grid)) if return_lse else out


@constant_when_compiled
def _made(
    grid: tuple[int, ...], window: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...],
    causal: tuple[bool, ...], more: int, block: Block, device: torch.device,
) -> tuple[BlockMask, Tensor | None, Tensor | None]:  # fmt: skip
    """The mask, the order of its tokens and the inverse order, None for the order of the grid."""
    with torch.inference_mode(False):  # otherwise a later training step could not use it
        order = _order(grid, dilation, max(block_pair(block)))
        rule: dict[str, Any] = {"window": window, "stride": stride, "dilation": dilation, "causal": causal}
        mask = neighborhood(grid, block=block, **rule)
        in_tiles = mask if order is None else neighborhood(grid, order=order, block=block, **rule)
        mask, order = (in_tiles, order) if len(in_tiles.indices) < len(mask.indices) else (mask, None)
        if more:
            tokens, beside = mask.q_len, BlockMask.dense(mask.q_len, more, block=block)
            mask = place([(mask, 0, 0), (beside, 0, tokens)], tokens, tokens + more)
        back = None if order is None else orders.inverse(order).to(device)
        return mask.to(device), None if order is None else order.to(device), back


_kept = bounded_tensors(maxsize=32)(_made)


def _order(grid: tuple[int, ...], dilation: tuple[int, ...], block: int) -> Tensor | None:
    """Tokens of one remainder together, in tiles of about `block` tokens; None: in the order of the grid."""
    if len(grid) == 1 and dilation == (1,):
        return None
    tile = [1] * len(grid)
    room = [-(-side // gap) for side, gap in zip(grid, dilation)]
    while math.prod(tile) < block and any(tile[axis] < room[axis] for axis in range(len(grid))):
        axis = min((a for a in range(len(grid)) if tile[a] < room[a]), key=lambda a: (tile[a], -a))
        tile[axis] *= 2
    in_tiles = orders.tiles(grid, [side * gap for side, gap in zip(tile, dilation)])
    places = coordinates(grid).long()
    remainder = (places % places.new_tensor(dilation) * places.new_tensor(strides(dilation))).sum(1)
    return in_tiles[remainder[in_tiles].argsort(stable=True)]


def _ordered(x: Tensor, order: Tensor | None, back: Tensor | None) -> Tensor:
    """Tokens `order` of `x [B, N, ...]`; its gradient is one such operation, too, and no sum over indices."""
    if order is None or back is None:
        return x
    return apply_with_inverse(lambda x: x.index_select(1, order), lambda x: x.index_select(1, back), x)
