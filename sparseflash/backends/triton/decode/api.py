"""Launches the decoding kernels. All sizes follow from shapes on the host; nothing is read from the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.cached import Cached
from sparseflash.backends.triton.availability import INTERPRETED
from sparseflash.backends.triton.decode.changes import Changes
from sparseflash.backends.triton.decode.kernels import Shape, combine_kernel, decode_kernel
from sparseflash.backends.triton.device import check_runs, multiplies_in_tf32
from sparseflash.backends.triton.device_functions.softmax import LOG2E
from sparseflash.backends.triton.launcher import Launch
from sparseflash.blockmask.cache import bounded
from sparseflash.limits import check_count
from sparseflash.scores.change import Scores

BLOCK_N = 32  # keys per step; with three stages, four programs fit on an SM at D = 128 in bf16
STAGES = 3
MOST_ROWS = 64  # of a tile of queries
SPLITS = 16  # programs per sequence; fewer or more to keep the keys of each program between these limits
FEWEST_KEYS, MOST_KEYS = 128, 1024
MOST_SPLITS = 128
SHARED_MEMORY = 99 * 1024  # bytes per program on every supported GPU; the limit of compute capability 8.6 and 8.9


class Call:
    """A decoding step prepared for one layout."""

    def __init__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, of: Cached, scale: float, splits: int | None = None
    ) -> None:  # fmt: skip
        """Raises unless the kernels run here. The mask `of.mask` is kept; all other tensors are passed at each call.

        scale: at least 0, because the softmax takes the maximum before scaling.
        """
        check_runs(q, INTERPRETED)
        (batch, q_heads, q_len, dim), v_dim = q.shape, v_cache.shape[3]
        kv_heads, mask = k_cache.shape[1], of.mask
        # Query heads that share keys but have different mask patterns run in separate programs.
        apart = mask is not None and mask.pattern.shape[1] not in (1, kv_heads)
        heads = q_heads if apart else kv_heads
        rows = q_heads // heads * q_len
        padded_d, padded_v = max(16, _power(dim)), max(16, _power(v_dim))
        block_n = BLOCK_N if mask is None else min(BLOCK_N, mask.block_k)
        block_m, stages = fitting(min(MOST_ROWS, max(16, _power(rows))), block_n, padded_d, padded_v, q.dtype.itemsize)
        row_tiles = -(-rows // block_m)
        capacity = of.capacity(k_cache)
        splits = splits_of(of, capacity, q_len) if splits is None else min(splits, max(capacity, 1))
        parts = batch * q_heads * q_len * splits
        for what, *factors in (
            ("batch x heads x tiles of rows x splits", batch, heads, row_tiles, splits),
            ("batch x heads x queries x splits", batch, q_heads, q_len, splits),
            ("chosen pages x their tokens", 0 if of.pages is None else of.pages.shape[2], of.page),
        ):
            check_count(what, *factors, remedy="Split the batch, or pass fewer of them.")
        self.out, self.lse = (batch, q_heads, q_len, v_dim), (batch, q_heads, q_len)
        self.workspace = parts * (padded_v + 2)
        self.programs = batch * heads * row_tiles * splits, batch * q_heads * q_len

        keep = q.dtype == torch.float32
        precision = "tf32" if keep and multiplies_in_tf32() else "ieee"
        self.arrays: tuple[Any, ...] = (None,) * 5
        numbers, block, walk = (0, 0, 0), (16, 16), "range"
        if mask is not None:
            self.arrays = (mask.indptr, mask.indices, mask.tile, mask.words, mask.pattern)
            of_batch, of_head = (
                stride if size > 1 else 0 for size, stride in zip(mask.pattern.shape, mask.pattern.stride())
            )
            numbers, block, walk = (of_batch, of_head, mask.blocks[0]), (mask.block_q, mask.block_k), "mask"
        if of.pages is not None:
            walk = "pages"
        strides = (*q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3])
        changes = Changes.of(of.changes)
        is_capped, is_log, is_changed = changes.constants
        shape = Shape(
            dim, v_dim, padded_d, padded_v, block_m, block_n, max(of.page, 1), *block, walk, keep, precision,
            is_capped, is_log, is_changed, q.dtype.itemsize == 2 and not INTERPRETED,
        )  # fmt: skip
        tensors = (
            q, k_cache, v_cache, of.lengths, of.starts, of.block_table, of.pages, *self.arrays, *changes.tensors
        )  # fmt: skip
        self._decoding, self._combining = _kernels(
            shape, _power(splits), tuple(None if x is None else x.dtype for x in tensors),
            tuple(x.data_ptr() % 16 == 0 for x in (q, k_cache, v_cache)), tuple(map(_kind, strides)),
            stages, q.device,
        )  # fmt: skip
        # Modified scores are scaled before, and so natural.
        qk_scale, in_softmax = (LOG2E.value, 1.0) if is_changed else (scale * LOG2E.value, scale)
        sizes = (
            _stride(of.lengths, "lengths"), 0 if of.starts is None else _stride(of.starts, "starts"),
            0 if of.pages is None else of.pages.shape[2], 0 if of.block_table is None else of.block_table.shape[1],
        )  # fmt: skip
        self._decoded = (
            *sizes, *numbers, parts, scale, qk_scale, q_len, rows, heads, heads // kv_heads, q_heads // heads, splits,
            row_tiles, of.window or 0, of.sinks, capacity, *changes.numbers, strides, shape,
        )  # fmt: skip
        self._combined = (
            parts, in_softmax, qk_scale, splits, q_len, q_heads, v_dim, padded_v, _power(splits), keep or is_changed
        )  # fmt: skip

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, starts: Tensor | None,
        block_table: Tensor | None, pages: Tensor | None, changes: Scores | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`(out [B, Hq, Nq, Dv], lse fp32 [B, Hq, Nq])`."""
        *of_scores, sink = Changes.of(changes).tensors
        out = torch.empty(self.out, dtype=q.dtype, device=q.device)
        lse = torch.empty(self.lse, dtype=torch.float32, device=q.device)
        if out.numel() == 0:
            return out, lse
        sums = torch.empty(self.workspace, dtype=torch.float32, device=q.device)
        self._decoding.start(
            self.programs[0], q, k_cache, v_cache, sums, lengths, starts, block_table, pages, *self.arrays,
            *of_scores, *self._decoded,
        )  # fmt: skip
        self._combining.start(self.programs[1], sums, out, lse, sink, *self._combined)
        return out, lse


def splits_of(of: Cached, capacity: int, q_len: int) -> int:
    """The number of programs that share the keys of a sequence.

    It depends on the capacity, the window and the pages alone, so that a sequence has the same bits in every batch.
    """
    walked = capacity
    if of.window is not None:
        walked = min(walked, of.window + q_len + of.sinks)
    if of.pages is not None:
        walked = min(walked, of.pages.shape[2] * of.page)
    keys = min(max(walked // SPLITS, FEWEST_KEYS), MOST_KEYS)
    return min(MOST_SPLITS, max(1, walked // keys))


def fitting(block_m: int, block_n: int, dim: int, v_dim: int, size: int) -> tuple[int, int]:
    """`(rows of a tile, stages)` that fit into SHARED_MEMORY, with at most `block_m` rows.

    dim, v_dim: padded head dims. size: bytes per number.

    >>> fitting(64, 32, 128, 128, 2), fitting(64, 32, 256, 256, 2), fitting(64, 32, 256, 256, 4)
    ((64, 3), (64, 2), (16, 2))
    """
    rows, stages = block_m, STAGES
    while (rows, stages) != (16, 2):
        stored = (stages - 1) * block_n * (dim + v_dim) + rows * (dim + block_n)  # keys and values; queries, weights
        if stored * size < SHARED_MEMORY:
            break
        rows, stages = rows if stages > 2 else rows // 2, 2
    return rows, stages


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _stride(x: Tensor, name: str) -> int:
    """The stride between the batch elements of `x`, `[B]`."""
    stride = x.stride(0) if len(x) > 1 else 0
    check_count(f"the stride of {name}", stride, remedy="Call .contiguous().")
    return stride


def _kind(stride: int) -> tuple[bool, bool, bool]:
    return stride % 16 == 0, stride == 1, stride >= 2**31


# The arguments are the key for everything that Triton specialises on: see `Launch.of_all_arguments`.
@bounded(maxsize=128)
def _kernels(
    shape: Shape, splits: int, dtypes: tuple[Any, ...], aligned: tuple[bool, ...],
    strides: tuple[tuple[bool, bool, bool], ...], stages: int, device: torch.device,
) -> tuple[Launch, Launch]:  # fmt: skip
    return (
        Launch.of_all_arguments(decode_kernel, device, num_warps=4, num_stages=stages),
        Launch.of_all_arguments(combine_kernel, device, num_warps=4, num_stages=1),
    )
