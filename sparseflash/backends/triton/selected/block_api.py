"""Launches the kernels of attention to chosen blocks, for some pairs of a batch element and a head at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_gradient, empty_lse, empty_out
from sparseflash.backends.triton.availability import INTERPRETED
from sparseflash.backends.triton.device import check_runs
from sparseflash.backends.triton.device_functions.fp32_split import input_precision
from sparseflash.backends.triton.device_functions.softmax import LOG2E
from sparseflash.backends.triton.launcher import OPTIONS, on_device
from sparseflash.backends.triton.selected.block_backward import (
    add_kernel,
    block_dkdv_kernel,
    block_dq_kernel,
    delta_kernel,
    pack_kernel,
    sum_kernel,
)
from sparseflash.backends.triton.selected.block_forward import BlockShape, block_forward_kernel, join_kernel
from sparseflash.backends.triton.selected.block_lists import (
    Chosen,
    Transposed,
    chosen_of,
    items_of,
    slot_bits,
    transposed,
)
from sparseflash.backends.triton.selected.block_rows import rows_dq_kernel, rows_forward_kernel
from sparseflash.backends.triton.selected.sizes import readable, strides_of
from sparseflash.backends.triton.selected.tiles import pieces, power
from sparseflash.limits import COUNT, check_count

_SCRATCH = 2 << 30  # bytes for the parts of a chunk
_ROWS = 16  # of a tile of the kernels that join parts
_PACKED = 1024  # rows of a program that packs statistics
_KEYS = 64  # of a tile of the kernels by queries
_SPLIT = 16  # heads that share a choice, from which on long lists of a block are cut
_LONGEST = 16_384  # rows of queries of a part


class Call:
    """What the kernels of one call share."""

    def __init__(
        self, sizes: Sequence[int], k: Tensor, v: Tensor, heads: int, choices: int, span: int, causal: bool,
        reach: int,
    ) -> None:  # fmt: skip
        """sizes: of q `[B, Hq, Nq, D]`. heads: that choose. reach: the largest offset in a group of q, see `_reach`."""
        (self.batch, query_heads, self.q_len, self.dim), (_, kv_heads, self.k_len, _) = sizes, k.shape
        self.heads, self.choices, self.span, self.causal = heads, choices, span, causal
        self.group, self.repeats, self.pairs = query_heads // heads, heads // kv_heads, self.batch * heads
        self.v_dim, self.blocks = v.shape[3], -(-self.k_len // span)
        self.far = max(reach, *(x.shape[2] * x.stride(2) for x in (k, v))) >= COUNT
        self.precision = input_precision(k.dtype)

    def shape(self, rows: int, keys: int) -> BlockShape:
        """The constants for tiles of these rows and keys, which lie in one block."""
        (low, high), group = pieces(self.dim), power(self.group, 1)
        return BlockShape(
            min(low, self.dim), max(0, self.dim - low) if high else 0, low, high, self.v_dim, power(self.v_dim),
            max(rows, group), group, group > self.group, slot_bits(self.choices), min(keys, self.span), self.causal,
            self.precision, self.far,
        )  # fmt: skip

    def by_queries(self, *, backward: bool) -> bool:
        """Whether a tile is a query with its group, or else a block with the queries that have chosen it.

        Measured on an H200, tried/portable.csv. A tile of a query is padded to 16 heads, and shares no block with other
        queries. But it writes no parts, and the parts of one pair with many queries may exceed the scratch memory.
        """
        if self._parts_of_pair(self.dim if backward else self.v_dim) > _SCRATCH:
            return True
        if self.span > 64:
            return self.group >= 16
        return self.group >= (4 if self.dim <= 64 and not backward else 8)

    def of_queries(self) -> BlockShape:
        """The constants of the kernels by queries."""
        return self.shape(max(16, power(self.group, 1)), _KEYS)

    def heads_of(self, x: Tensor) -> tuple[int, ...]:
        """The strides of the batch, the head that chooses, the token, and the head of its group."""
        return x.stride(0), x.stride(1) * self.group, x.stride(2), x.stride(1)

    def numbers(self, first_pair: int) -> tuple[int, ...]:
        return (
            self.q_len, self.k_len, self.k_len - self.q_len, self.heads, self.repeats, self.group, self.choices,
            self.blocks, self.span, first_pair, first_pair * self.blocks,
        )  # fmt: skip

    def _parts_of_pair(self, width: int) -> int:
        """The bytes that the parts of a pair take, with `width` numbers a row."""
        return 4 * width * self.q_len * self.choices * self.group

    def chunks(self, width: int) -> Iterator[tuple[int, int]]:
        """`(first pair, pairs)`, whose parts of `width` numbers a row fit into the scratch memory."""
        most = _SCRATCH // self._parts_of_pair(width)
        for first in range(0, self.pairs, most):
            yield first, min(most, self.pairs - first)

    def items(self, lists: Transposed, first: int, pairs: int, shape: BlockShape) -> tuple[Tensor, Tensor, int]:
        """`(ends of the tiles of each block, block of each tile, blocks)` of a chunk."""
        count = pairs * self.blocks
        entries = pairs * self.q_len * self.choices
        return *items_of(lists.ends, first * self.blocks, count, entries, shape.ROWS // shape.GROUP), count


def _warps(shape: BlockShape, of_16: int) -> int:
    """The number of warps for a tile, given the number for 16 rows."""
    return min(4, of_16 * (shape.ROWS // 16))


def _reach(heads: int, *tensors: Tensor) -> int:
    """Past the largest offset of a token from the first of its group, in tensors `[B, Hq, Nq, D]`."""
    return max(x.shape[2] * x.stride(2) + (x.shape[1] // heads - 1) * x.stride(1) for x in tensors)


def forward(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, span: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Chosen]:
    """`(out, lse, lists)`."""
    check_runs(q, INTERPRETED)
    out, lse = empty_out(q, v), empty_lse(q)
    q, k, v = readable(q), readable(k), readable(v)
    of = Call(q.shape, k, v, index.shape[1], index.shape[3], span, causal, _reach(index.shape[1], q))
    check_count(
        "batch x heads that choose x queries x blocks of each", of.pairs, of.q_len, 1 << slot_bits(of.choices),
        remedy="Split the batch.",
    )  # fmt: skip
    if out.numel() == 0 or k.numel() == 0 or of.choices == 0:
        sizes = (of.pairs, of.q_len, of.choices), (of.pairs, of.q_len)
        blocks, counts = (index.new_zeros(size, dtype=torch.int32) for size in sizes)
        return out.zero_(), lse.fill_(-torch.inf), Chosen(blocks, counts)
    with on_device(q.device):
        chosen = chosen_of(index, of.blocks, span, of.k_len, causal)
        if of.by_queries(backward=False):
            shape = of.of_queries()
            rows_forward_kernel[(of.pairs * of.q_len,)](
                q, k, v, *chosen, out, lse, *of.numbers(0)[:7], scale * LOG2E.value,
                (of.heads_of(q), of.heads_of(out), *strides_of(k, v)), shape, span, of.k_len % span == 0,
                num_warps=_warps(shape, 4 if of.dim > 128 else 1), num_stages=2, **OPTIONS,
            )  # fmt: skip
            return out, lse, chosen
        lists, shape = transposed(chosen, of.blocks), of.shape(128, 128)
        for first, pairs in of.chunks(of.v_dim):
            rows = pairs * of.q_len * of.choices * of.group
            parts = torch.empty(rows, of.v_dim, dtype=torch.float32, device=q.device)
            lse_of_parts = torch.empty(rows, dtype=torch.float32, device=q.device)
            stops, numbers, count = of.items(lists, first, pairs, shape)
            block_forward_kernel[(len(numbers),)](
                q, k, v, *lists, stops, numbers, parts, lse_of_parts, *of.numbers(first), count, scale * LOG2E.value,
                (of.heads_of(q), *strides_of(k, v)), shape, num_warps=8, num_stages=2, **OPTIONS,
            )  # fmt: skip
            join_kernel[(pairs * of.group * -(-of.q_len // _ROWS),)](
                parts, lse_of_parts, chosen.blocks, out, lse, of.q_len, of.heads, of.group, of.choices, first,
                tuple(out.stride()[:3]), of.v_dim, shape.PADDED_DV, _ROWS, num_warps=4, **OPTIONS,
            )  # fmt: skip
    return out, lse, chosen


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, chosen: Chosen,
    span: int, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`(dq, dk, dv)`."""
    choices, dq = chosen.blocks.shape[2], empty_gradient(q)
    if dq.numel() == 0 or k.numel() == 0 or choices == 0:
        return dq.zero_(), empty_gradient(k).zero_(), empty_gradient(v).zero_()
    heads = chosen.blocks.shape[0] // q.shape[0]
    q_, k_, v_, dout = (readable(x) for x in (q, k, v, dout))
    dlse = None if dlse is None else dlse.contiguous()
    of = Call(q.shape, k_, v_, heads, choices, span, causal, _reach(heads, q_, dout))
    written = dq if dq.stride(3) == 1 else torch.empty(dq.shape, dtype=dq.dtype, device=dq.device)
    lse2, delta = torch.empty(2, *lse.shape, dtype=torch.float32, device=q.device)
    scales = scale, scale * LOG2E.value
    with on_device(q.device):
        lists = transposed(chosen, of.blocks)
        if of.by_queries(backward=True):
            shape = of.of_queries()
            strides = *(of.heads_of(x) for x in (q_, dout, out, written)), *strides_of(k_, v_)
            rows_dq_kernel[(of.pairs * of.q_len,)](
                q_, k_, v_, dout, out, *chosen, lse, dlse, written, lse2, delta, *of.numbers(0)[:7], *scales, strides,
                shape, span, of.k_len % span == 0, num_warps=_warps(shape, 2), num_stages=2 if of.dim > 128 else 3,
                **OPTIONS,
            )  # fmt: skip
        else:
            tiles = -(-of.q_len // _ROWS)
            delta_kernel[(lse.shape[0] * lse.shape[1] * tiles,)](
                dout, out, lse, dlse, lse2, delta, of.q_len, q.shape[1], strides_of(dout, out), of.v_dim,
                power(of.v_dim), _ROWS, num_warps=4, **OPTIONS,
            )  # fmt: skip
            shape, strides = of.shape(128, 64), (of.heads_of(q_), *strides_of(k_, v_), of.heads_of(dout))
            for first, pairs in of.chunks(of.dim):
                parts = torch.empty(
                    pairs * of.q_len * of.choices * of.group, of.dim, dtype=torch.float32, device=q.device
                )  # fmt: skip
                stops, numbers, count = of.items(lists, first, pairs, shape)
                block_dq_kernel[(len(numbers),)](
                    q_, k_, v_, dout, lse2, delta, *lists, stops, numbers, parts, *of.numbers(first), count, *scales,
                    strides, shape, num_warps=8, num_stages=2, **OPTIONS,
                )  # fmt: skip
                add_kernel[(pairs * of.group * tiles,)](
                    parts, chosen.blocks, written, of.q_len, of.heads, of.group, of.choices, first,
                    tuple(written.stride()[:3]), of.dim, power(of.dim), _ROWS, num_warps=4, **OPTIONS,
                )  # fmt: skip
        dk, dv = _of_keys(of, q_, k_, v_, dout, lse2, delta, lists, scale)
    if written is not dq:
        dq.copy_(written)
    return dq, empty_gradient(k).copy_(dk), empty_gradient(v).copy_(dv)


def _of_keys(
    of: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse2: Tensor, delta: Tensor, lists: Transposed,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(dk, dv)`, in q's dtype, or in fp32 where several heads that choose share a key head."""
    device, entries, group = q.device, lists.entries.numel(), power(of.group, 1)
    wide = q.dtype if of.repeats == 1 else torch.float32
    dk, dv = (torch.empty(of.batch, of.heads, *x.shape[2:], dtype=wide, device=device) for x in (k, v))
    packed = torch.empty(2, entries, group, dtype=torch.float32, device=device)
    tiles = -(-of.q_len * of.choices * group // _PACKED)
    pack_kernel[(of.pairs * tiles,)](
        lse2, delta, *lists, packed, of.q_len, of.group, of.blocks, tiles, entries, group, slot_bits(of.choices),
        _PACKED, num_warps=4, **OPTIONS,
    )  # fmt: skip
    large = of.dim + of.v_dim > 256
    shape = of.shape(64, 64 if large else 128)
    options = {"num_warps": 8 if large or shape.BLOCK_N >= 128 else 4, "num_stages": 2}
    tensors, strides = (q, k, v, dout, packed, *lists), (of.heads_of(q), *strides_of(k, v), of.heads_of(dout))
    count, scales = of.pairs * of.blocks, (scale, scale * LOG2E.value)
    parts = -(-of.span // shape.BLOCK_N)
    if group < _SPLIT:
        block_dkdv_kernel[(count * parts,)](
            *tensors, None, None, dk, dv, *of.numbers(0), count, entries, 0, *scales, strides, shape, False, **options,
            **OPTIONS,
        )  # fmt: skip
    else:  # a block that all queries choose would take longer than all others together
        longest, of_item = _LONGEST // group, 4 * of.span * (of.dim + of.v_dim)
        while entries // longest * of_item > _SCRATCH:
            longest *= 2
        stops, numbers = items_of(lists.ends, 0, count, entries, longest)
        of_parts = [
            torch.empty(len(numbers) * of.span, dim, dtype=torch.float32, device=device) for dim in (of.dim, of.v_dim)
        ]
        block_dkdv_kernel[(len(numbers) * parts,)](
            *tensors, stops, numbers, *of_parts, *of.numbers(0), count, entries, longest, *scales, strides, shape, True,
            **options, **OPTIONS,
        )  # fmt: skip
        for part, total in zip(of_parts, (dk, dv)):
            width, at_once = total.shape[3], min(of.span, 16)
            sum_kernel[(count * (of.span // at_once),)](
                part, stops, total, of.k_len, of.blocks, of.span, width, power(width), at_once, num_warps=4, **OPTIONS
            )
    if of.repeats == 1:
        return dk, dv
    return dk.unflatten(1, (-1, of.repeats)).sum(2), dv.unflatten(1, (-1, of.repeats)).sum(2)
