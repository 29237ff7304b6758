"""Launches the kernels of the backward, for one chunk of queries after another."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_gradient
from sparseflash.backends.triton.launcher import on_device
from sparseflash.backends.triton.selected.lists import Chosen
from sparseflash.backends.triton.selected.places import count_kernel, mark_kernel, place_kernel
from sparseflash.backends.triton.selected.score_gradients import dq_kernel, score_gradients_kernel
from sparseflash.backends.triton.selected.sizes import Sizes, readable, sizes_of, strides_of
from sparseflash.backends.triton.selected.tiles import dq_tile, power, rows_tile
from sparseflash.backends.triton.selected.token_sums import rows_kernel, sum_kernel
from sparseflash.limits import COUNT

_SCRATCH = 2 << 30  # bytes for the rows of a chunk; a constant, because chunks decide the order of sums
_MOST_QUERIES = 1024  # of a chunk: a token has a bit for each


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, out: Tensor, lse: Tensor,
    chosen: Chosen, kept: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`(dq, dk, dv)`; without v, dk holds the gradients of keys and values, and dv is None."""
    dq = empty_gradient(q)
    v_dim = out.shape[3]
    of = sizes_of(q, k, v, v_dim, chosen.lists.shape[3], scale, backward=True)
    size = of.batch * of.kv_heads * of.k_len
    dim = q.shape[3]
    widths = (dim,) if v is None else (dim, v_dim)
    sums = [torch.zeros(size, width, dtype=torch.float32, device=q.device) for width in widths]
    if lse.numel() and of.choices and size:
        q_, k_, v_, dout = readable(q), readable(k), None if v is None else readable(v), readable(dout)
        dlse = None if dlse is None else dlse.contiguous()
        written = dq if dq.stride(-1) == 1 else torch.empty(dq.shape, dtype=dq.dtype, device=dq.device)
        with on_device(q.device):
            for first, pairs, queries in chunks_of(of, dim + (0 if v is None else v_dim), q.element_size()):
                _backward_of_chunk(
                    Tensors(q_, k_, v_, dout, out, lse, dlse, kept, written, chosen), sums, of, first, pairs, queries
                )
        if written is not dq:
            dq.copy_(written)
    else:
        dq.zero_()
    gradients = [empty_gradient(x).copy_(total.view(x.shape)) for x, total in zip((k, v), sums) if x is not None]
    return dq, gradients[0], gradients[1] if v is not None else None


class Tensors(NamedTuple):
    """What the kernels of the backward read, and dq, which they write."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    dout: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    kept: Tensor
    dq: Tensor
    chosen: Chosen


def _backward_of_chunk(x: Tensors, sums: list[Tensor], of: Sizes, first_row: int, pairs: int, queries: int) -> None:
    """Writes dq of the lists from `first_row` on, and adds to the sums of keys and values."""
    rows, device, dtype = pairs * queries, x.q.device, x.q.dtype
    p, ds = torch.empty(2, rows * of.group, of.choices, dtype=dtype, device=device)
    score_gradients_kernel[(rows * of.shape.TILES,)](
        x.q, x.k, x.v, x.dout, x.out, *x.chosen, x.lse, x.kept if of.keep else None, x.dlse, p, ds, *of.numbers,
        first_row, x.lse.numel(), of.scale, of.qk_scale, strides_of(x.q, x.k, x.v, x.dout, x.out), of.shape,
        **of.options,
    )  # fmt: skip
    tile = dq_tile(of.group, dtype.itemsize)
    for column, count in ((0, of.shape.LOW), (of.shape.PADDED_LOW, of.shape.HIGH)):
        if count:
            piece = min(power(count), tile.columns)
            dq_kernel[(rows * tile.tiles * -(-count // piece),)](
                ds, x.k, *x.chosen, x.dq, *of.numbers, first_row, strides_of(x.k, x.dq), column, count, piece,
                tile.heads, tile.tiles, tile.tokens, of.precision, of.shape.FAR, num_warps=tile.warps(piece),
                num_stages=3,
            )  # fmt: skip
    counts, ends, places = places_of(x.chosen, of, first_row, pairs, queries)
    first_token = first_row // of.q_len * of.k_len
    dim, v_dim = x.q.shape[3], x.out.shape[3]
    work: list[tuple[int, list[tuple[Any, ...]]]] = []
    if x.v is None:
        work.append((dim, [(x.q, ds, x.dout, p, 0, v_dim), (x.q, ds, None, None, v_dim, dim - v_dim)]))
    else:
        work.append((dim, [(x.q, ds, None, None, 0, dim)]))
        work.append((v_dim, [(x.dout, p, None, None, 0, v_dim)]))
    for (width, products), total in zip(work, sums, strict=True):
        partial = torch.empty(rows * of.choices, width, dtype=torch.float32, device=device)
        for left, weights, other, other_weights, column, count in products:
            if count == 0:
                continue
            tile = rows_tile(of.group, dtype.itemsize)
            piece = min(power(count), tile.columns)
            rows_kernel[(rows * -(-count // piece),)](
                left, weights, other, other_weights, x.chosen.counts, places, partial, of.q_len, of.kv_heads, of.group,
                of.choices, first_row, width, strides_of(left, other), piece, column, count, tile.heads, tile.tokens,
                of.precision, num_warps=tile.warps(piece), num_stages=2,
            )  # fmt: skip
        wide = power(width)
        sum_kernel[(pairs * of.k_len,)](
            partial, counts, ends, total, first_token, width, wide, max(1, 4096 // wide), num_warps=4, num_stages=2
        )  # fmt: skip


def places_of(chosen: Chosen, of: Sizes, first_row: int, pairs: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """`(counts, ends, places)`: choices of each token, their running sums, and the place of each choice."""
    device, tokens = chosen.lists.device, pairs * of.k_len
    words = power(-(-queries // 32), 1)
    bits = torch.zeros(tokens, words, dtype=torch.int32, device=device)
    counts = torch.empty(tokens, dtype=torch.int32, device=device)
    places = torch.empty(pairs * queries, of.choices, dtype=torch.int32, device=device)
    numbers = (first_row, queries, of.k_len, of.choices, words)
    mark_kernel[(pairs * queries,)](*chosen, bits, *numbers, 128, num_warps=4)
    count_kernel[(-(-tokens // 64),)](bits, counts, tokens, words, 64, num_warps=4)
    ends = counts.cumsum(0, dtype=torch.int64)
    place_kernel[(pairs * queries,)](*chosen, bits, ends, places, *numbers, 64, num_warps=4)
    return counts, ends, places


def chunks_of(of: Sizes, width: int, size: int) -> list[tuple[int, int, int]]:
    """`(first list, pairs of batch element and key head, queries of each)` of the chunks of a backward.

    A chunk has whole pairs, or a part of the queries of one pair.
    """
    of_query = of.choices * (4 * width + 2 * size * of.group)
    most = min(max(1, _SCRATCH // of_query), max(1, (COUNT - 1) // (of.choices * of.group)))
    pairs = of.batch * of.kv_heads
    if of.q_len <= min(most, _MOST_QUERIES):
        many = most // of.q_len
        return [(first * of.q_len, min(many, pairs - first), of.q_len) for first in range(0, pairs, many)]
    queries = min(most, _MOST_QUERIES)
    return [
        (pair * of.q_len + first, 1, min(queries, of.q_len - first))
        for pair in range(pairs)
        for first in range(0, of.q_len, queries)
    ]
