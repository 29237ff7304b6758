"""Launches the kernels of the backward, for one chunk of queries after another."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_gradient
from sparseflash.backends.triton.launcher import OPTIONS, on_device
from sparseflash.backends.triton.selected.block_backward import delta_kernel
from sparseflash.backends.triton.selected.lists import Chosen
from sparseflash.backends.triton.selected.places import count_kernel, mark_kernel, place_kernel
from sparseflash.backends.triton.selected.score_gradients import dq_kernel, score_gradients_kernel
from sparseflash.backends.triton.selected.sizes import Sizes, readable, sizes_of, strides_of
from sparseflash.backends.triton.selected.tiles import dq_tile, power, rows_tile
from sparseflash.backends.triton.selected.token_sums import rows_kernel, sum_kernel
from sparseflash.backends.triton.selected.token_tiles import TILE, entries_kernel, tile_dkdv_kernel, unite_kernel
from sparseflash.limits import COUNT

_SCRATCH = 2 << 30  # bytes for the rows of a chunk; a constant, because chunks decide the order of sums
_MOST_QUERIES = 1024  # of a chunk with rows: a program has the bits of all of them
# Tiles of tokens: the widest head dims, and the most heads of a group, with which a tile fits into registers; and the
# most tiles times heads for each choice. A tile reads 2 bytes of a query's channel and head from the L2 cache, for up
# to 64 tokens at once. Rows are 8 bytes of a channel for each token, written and read in memory.
_WIDEST, _MOST_HEADS, _WORTH = 256, 64, 8


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
        tensors = Tensors(q_, k_, v_, dout, out, lse, dlse, kept, written, chosen)
        by_tiles = v is not None and _has_tiles(of, max(dim, v_dim))
        with on_device(q.device):
            # Of each choice: its row, and the weights and gradients of its scores.
            of_query = of.choices * (4 * sum(widths) * (not by_tiles) + 2 * q.element_size() * of.group)
            for chunk in chunks_of(of, of_query, of.q_len if by_tiles else _MOST_QUERIES):
                _backward_of_chunk(tensors, None if by_tiles else sums, of, *chunk)
            if by_tiles:
                _add_tiles(tensors, sums, of)
        if written is not dq:
            dq.copy_(written)
    else:
        dq.zero_()
    gradients = [empty_gradient(x).copy_(total.view(x.shape)) for x, total in zip((k, v), sums) if x is not None]
    return dq, gradients[0], gradients[1] if v is not None else None


def scores_backward(dscores: Tensor, q: Tensor, k: Tensor, chosen: Chosen, scale: float) -> tuple[Tensor, Tensor]:
    """`(dq, dk)` of the scores of chosen tokens; dscores is 0 for entries that are none."""
    dq = empty_gradient(q)
    of = sizes_of(q, k, None, 1, chosen.lists.shape[3], scale, backward=False)
    total = torch.zeros(of.batch * of.kv_heads * of.k_len, q.shape[3], dtype=torch.float32, device=q.device)
    if not (dscores.numel() and total.numel()):
        return dq.zero_(), empty_gradient(k).zero_()
    q, k = readable(q), readable(k)
    written = dq if dq.stride(-1) == 1 else torch.empty(dq.shape, dtype=dq.dtype, device=dq.device)
    by_list = dscores.unflatten(1, (of.kv_heads, of.group)).transpose(2, 3).flatten(0, 2)  # [lists, group, choices]
    with on_device(q.device):
        of_query = of.choices * (4 * q.shape[3] + 2 * q.element_size() * of.group)
        for first, pairs, queries in chunks_of(of, of_query, _MOST_QUERIES):
            rows = pairs * queries
            ds = (by_list[first : first + rows] * scale).to(q.dtype).contiguous()
            _write_dq(ds, k, chosen, written, of, first, rows)
            _add_rows([[Product(q, ds, 0, q.shape[3])]], [total], chosen, of, first, pairs, queries)
    if written is not dq:
        dq.copy_(written)
    return dq, empty_gradient(k).copy_(total.view(k.shape))


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


def _backward_of_chunk(
    x: Tensors, sums: list[Tensor] | None, of: Sizes, first_row: int, pairs: int, queries: int
) -> None:  # fmt: skip
    """Writes dq of the lists from `first_row` on, and adds to the sums of keys and values if there are any."""
    rows, device, dtype = pairs * queries, x.q.device, x.q.dtype
    ds = torch.empty(rows * of.group, of.choices, dtype=dtype, device=device)
    p = None if sums is None else torch.empty_like(ds)
    score_gradients_kernel[(rows * of.shape.TILES,)](
        x.q, x.k, x.v, x.dout, x.out, *x.chosen, x.lse, x.kept if of.keep else None, x.dlse, p, ds, *of.numbers,
        first_row, x.kept.shape[-1], of.scale, of.qk_scale, strides_of(x.q, x.k, x.v, x.dout, x.out), of.shape,
        **of.options, **OPTIONS,
    )  # fmt: skip
    _write_dq(ds, x.k, x.chosen, x.dq, of, first_row, rows)
    if sums is None or p is None:
        return
    dim, v_dim = x.q.shape[3], x.out.shape[3]
    if x.v is None:
        work = [[Product(x.q, ds, 0, v_dim, x.dout, p), Product(x.q, ds, v_dim, dim - v_dim)]]
    else:
        work = [[Product(x.q, ds, 0, dim)], [Product(x.dout, p, 0, v_dim)]]
    _add_rows(work, sums, x.chosen, of, first_row, pairs, queries)


class Product(NamedTuple):
    """A part of the rows of tokens: the sum of weights times x over the heads, in some columns."""

    x: Tensor  # [B, Hq, Nq, .]
    weights: Tensor  # [queries of the chunk * group, choices]
    column: int
    columns: int
    y: Tensor | None = None  # a second product in the same columns
    y_weights: Tensor | None = None


def _write_dq(ds: Tensor, k: Tensor, chosen: Chosen, dq: Tensor, of: Sizes, first_row: int, rows: int) -> None:
    tile = dq_tile(of.group, ds.element_size())
    for column, count in ((0, of.shape.LOW), (of.shape.PADDED_LOW, of.shape.HIGH)):
        if count:
            piece = min(power(count), tile.columns)
            dq_kernel[(rows * tile.tiles * -(-count // piece),)](
                ds, k, *chosen, dq, *of.numbers, first_row, strides_of(k, dq), column, count, piece, tile.heads,
                tile.tiles, tile.tokens, of.precision, of.shape.FAR, num_warps=tile.warps(piece),
                num_stages=tile.stages, **OPTIONS,
            )  # fmt: skip


def _add_rows(
    work: list[list[Product]], sums: list[Tensor], chosen: Chosen, of: Sizes, first_row: int, pairs: int, queries: int
) -> None:
    counts, ends, places = places_of(chosen, of, first_row, pairs, queries)
    rows, first_token = pairs * queries, first_row // of.q_len * of.k_len
    for products, total in zip(work, sums, strict=True):
        width = total.shape[1]
        partial = torch.empty(rows * of.choices, width, dtype=torch.float32, device=total.device)
        for x, weights, column, columns, y, y_weights in products:
            if columns == 0:
                continue
            tile = rows_tile(of.group, x.element_size())
            piece = min(power(columns), tile.columns)
            rows_kernel[(rows * -(-columns // piece),)](
                x, weights, y, y_weights, chosen.counts, places, partial, of.q_len, of.kv_heads, of.group, of.choices,
                first_row, width, strides_of(x, y), piece, column, columns, tile.heads, tile.tokens, of.precision,
                num_warps=tile.warps(piece), num_stages=tile.stages, **OPTIONS,
            )  # fmt: skip
        wide = power(width)
        sum_kernel[(pairs * of.k_len,)](
            partial, counts, ends, total, first_token, width, wide, max(1, 4096 // wide), num_warps=4, num_stages=2,
            **OPTIONS,
        )  # fmt: skip


def places_of(chosen: Chosen, of: Sizes, first_row: int, pairs: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """`(counts, ends, places)`: choices of each token, their running sums, and the place of each choice."""
    device, tokens = chosen.lists.device, pairs * of.k_len
    bits = bits_of(chosen, of, first_row, pairs, queries)
    words = bits.shape[1]
    counts = torch.empty(tokens, dtype=torch.int32, device=device)
    places = torch.empty(pairs * queries, of.choices, dtype=torch.int32, device=device)
    numbers = (first_row, queries, of.k_len, of.choices, words)
    count_kernel[(-(-tokens // 64),)](bits, counts, tokens, words, 64, num_warps=4, **OPTIONS)
    ends = counts.cumsum(0, dtype=torch.int64)
    place_kernel[(pairs * queries,)](*chosen, bits, ends, places, *numbers, 64, num_warps=4, **OPTIONS)
    return counts, ends, places


def _has_tiles(of: Sizes, widest: int) -> bool:
    """Whether keys and values gather queries by tiles of tokens."""
    fits = not of.keep and widest <= _WIDEST and of.group <= _MOST_HEADS
    return fits and min(of.choices, -(-of.k_len // TILE)) * of.group <= _WORTH * of.choices


def _add_tiles(x: Tensors, sums: list[Tensor], of: Sizes) -> None:
    """Adds to the sums of keys and values."""
    dim, v_dim, device = x.q.shape[3], x.out.shape[3], x.q.device
    lse2, delta = torch.empty(2, *x.lse.shape, dtype=torch.float32, device=device)
    delta_kernel[(x.lse.shape[0] * x.lse.shape[1] * -(-of.q_len // 64),)](
        x.dout, x.out, x.lse, x.dlse, lse2, delta, of.q_len, x.q.shape[1], strides_of(x.dout, x.out), v_dim,
        power(v_dim), 64, num_warps=4, **OPTIONS,
    )  # fmt: skip
    tiles, group = -(-of.k_len // TILE), power(of.group, 1)
    large = power(dim) + power(v_dim) >= 256
    for first_row, pairs, queries in chunks_of(of, of.k_len // 8 + 4 * min(of.choices, tiles), of.q_len):
        lists = tiles_of(x.chosen, of, first_row, pairs, queries)
        tile_dkdv_kernel[(pairs * tiles,)](
            x.q, x.k, x.v, x.dout, lse2, delta, *lists, *sums, of.q_len, of.k_len, of.kv_heads, of.group,
            first_row // of.q_len, first_row % of.q_len, tiles, of.scale, of.qk_scale,
            strides_of(x.q, x.k, x.v, x.dout), dim, power(dim), v_dim, power(v_dim), group, max(64, group),
            lists.bits.shape[1], TILE, of.precision, of.shape.FAR, num_warps=8 if large else 4, num_stages=2, **OPTIONS,
        )  # fmt: skip


class Tiles(NamedTuple):
    """The queries of a chunk that have chosen a token of each tile."""

    bits: Tensor  # int32 [tokens of all pairs, words]: whether each query has chosen each token
    entries: Tensor  # int32: the queries of a tile in ascending order, then of the next
    ends: Tensor  # int32 [tiles of all pairs]: where the entries of each end


def tiles_of(chosen: Chosen, of: Sizes, first_row: int, pairs: int, queries: int) -> Tiles:
    """The lists of the tiles of a chunk."""
    bits, tiles, device = bits_of(chosen, of, first_row, pairs, queries), -(-of.k_len // TILE), chosen.lists.device
    words, programs = bits.shape[1], (pairs * tiles,)
    united = torch.empty(pairs * tiles, words, dtype=torch.int32, device=device)
    counts = torch.empty(pairs * tiles, dtype=torch.int32, device=device)
    entries = torch.empty(pairs * queries * min(of.choices, tiles), dtype=torch.int32, device=device)
    step = min(words, 64)
    unite_kernel[programs](bits, united, counts, of.k_len, tiles, words, step, TILE, num_warps=4, **OPTIONS)
    ends = counts.cumsum(0, dtype=torch.int32)
    entries_kernel[programs](united, ends, entries, words, step, num_warps=1, **OPTIONS)
    return Tiles(bits, entries, ends)


def bits_of(chosen: Chosen, of: Sizes, first_row: int, pairs: int, queries: int) -> Tensor:
    """Whether each query of a chunk has chosen each token: int32 `[tokens of all pairs, words]`, a bit a query."""
    words = power(-(-queries // 32), 1)
    bits = torch.zeros(pairs * of.k_len, words, dtype=torch.int32, device=chosen.lists.device)
    numbers = (first_row, queries, of.k_len, of.choices, words)
    mark_kernel[(pairs * queries,)](*chosen, bits, *numbers, 128, num_warps=4, **OPTIONS)
    return bits


def chunks_of(of: Sizes, of_query: int, longest: int) -> list[tuple[int, int, int]]:
    """`(first list, pairs of batch element and key head, queries of each)` of the chunks of a backward.

    A chunk has whole pairs, or a part of the queries of one pair.

    of_query: bytes of a query. longest: the most queries of a part.
    """
    most = min(max(1, _SCRATCH // of_query), max(1, (COUNT - 1) // (of.choices * of.group)))
    pairs = of.batch * of.kv_heads
    if of.q_len <= min(most, longest):
        many = most // of.q_len
        return [(first * of.q_len, min(many, pairs - first), of.q_len) for first in range(0, pairs, many)]
    queries = min(most, longest)
    return [
        (pair * of.q_len + first, 1, min(queries, of.q_len - first))
        for pair in range(pairs)
        for first in range(0, of.q_len, queries)
    ]
