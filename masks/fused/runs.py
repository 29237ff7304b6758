"""Keys chosen by each query, in runs of whole words, in four launches: mark the runs, find the tiles, write them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.launcher import launches_of
from sparseflash.blockmask import bitmask
from sparseflash.masks.tiling.chosen import Frame

_QUERIES = tl.constexpr(16)
_CHOICES = tl.constexpr(32)


def tiles_of_runs(indices: Tensor, of: Frame, span: int, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arrays of the mask of `indices [B, H, Nq, K]`: `(indptr, indices, tile, bits)`, for `room` tiles.

    One index stands for `span` keys, which are whole words of a tile's bits and at most one tile. An index of no run is
    ignored.
    """
    indices = indices.contiguous()
    patterns, (q_len, choices) = indices.shape[0] * indices.shape[1], indices.shape[2:]
    (rows, cols), (block_q, block_k) = of.open.shape, of.block
    device, lists, in_tile, words = indices.device, patterns * rows, block_k // span, bitmask.words_per_row(block_k)
    table = torch.zeros(lists * block_q * cols * in_tile, dtype=torch.uint8, device=device)
    kept = torch.empty(lists * cols, dtype=torch.uint8, device=device)
    counts = torch.empty(lists + 1, dtype=torch.int32, device=device)
    bits = torch.zeros(room, block_q, words, dtype=torch.int32, device=device)
    found = torch.empty(room, dtype=torch.int32, device=device)
    tile = torch.empty_like(found)
    key = device, cols, of.block, span, of.causal, indices.dtype, indices.data_ptr() % 16
    _marking(*key).start(
        -(-patterns * q_len // _QUERIES.value), indices, table, patterns * q_len, q_len, choices, rows * block_q,
        cols * in_tile, -(-of.k_len // span), of.k_len - q_len, span, of.causal,
    )  # fmt: skip
    _finding(*key).start(lists, table, kept, counts, cols, block_q, in_tile, max(16, 64 // in_tile))
    indptr = counts.cumsum(0, dtype=torch.int32)
    _writing(*key).start(
        lists * cols, table, kept, of.kind, of.bits, indptr, found, tile, bits, rows, cols, lists, room,
        -(-room // (lists * cols)), block_q, in_tile, words, bitmask.full_word(block_k),
        max(16, 1 << (cols - 1).bit_length()),
    )  # fmt: skip
    return indptr, found, tile, bits


@triton.jit(do_not_specialize=["queries", "q_len", "choices", "padded_q", "width", "runs", "shift"])
def mark_kernel(
    indices_ptr, table_ptr,  # int [P, q_len, choices]; uint8 [P, padded_q, width], zeros
    queries, q_len, choices, padded_q, width, runs, shift,
    SPAN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Marks the runs that some queries name. A run that is named twice is written twice with the same value."""
    query = tl.program_id(0).to(tl.int64) * _QUERIES + tl.arange(0, _QUERIES)
    pattern, q = query // q_len, query % q_len
    row_ptr = table_ptr + (pattern * padded_q + q) * width
    for first in range(0, choices, _CHOICES):
        choice = first + tl.arange(0, _CHOICES)
        here = (query[:, None] < queries) & (choice[None, :] < choices)
        run = tl.load(indices_ptr + query[:, None] * choices + choice[None, :], mask=here, other=-1).to(tl.int64)
        named = here & (run >= 0) & (run < runs)
        if CAUSAL:  # a run that has begun has a live key; one that has not begun has none
            named = named & (run * SPAN <= q[:, None] + shift)
        tl.store(row_ptr[:, None] + run, tl.full([_QUERIES, _CHOICES], 1, tl.uint8), mask=named)


@triton.jit(do_not_specialize=["cols"])
def find_kernel(
    table_ptr,  # uint8 [P * Mq, BLOCK_Q, cols * IN_TILE]
    kept_ptr, counts_ptr,  # uint8 [P * Mq, cols], int32 [1 + P * Mq], the first one 0
    cols, BLOCK_Q: tl.constexpr, IN_TILE: tl.constexpr, COLS: tl.constexpr,  # at once
):  # fmt: skip
    """Finds the tiles of one row in which a run is marked, and counts them."""
    program = tl.program_id(0).to(tl.int64)
    width = cols * IN_TILE
    table_ptr += (program * BLOCK_Q + tl.arange(0, BLOCK_Q))[:, None] * width
    count = tl.zeros([], tl.int32)
    for first in range(0, cols, COLS):
        run = first * IN_TILE + tl.arange(0, COLS * IN_TILE)
        marked = tl.load(table_ptr + run[None, :], mask=run[None, :] < width, other=0).to(tl.int32)
        kept = tl.max(tl.max(marked, 0).reshape(COLS, IN_TILE), 1)
        col = first + tl.arange(0, COLS)
        tl.store(kept_ptr + program * cols + col, kept.to(tl.uint8), mask=col < cols)
        count += tl.sum(kept, 0)
    tl.store(counts_ptr + 1 + program, count)
    if program == 0:
        tl.store(counts_ptr, 0)


@triton.jit(do_not_specialize=["rows", "cols", "lists", "room", "share"])
def write_kernel(
    table_ptr, kept_ptr, kind_ptr, words_ptr,  # the last two of the frame: int32 [rows, cols], [T, BLOCK_Q, WORDS]
    indptr_ptr, indices_ptr, tile_ptr, bits_ptr,  # int32 [lists + 1], [room] twice, [room, BLOCK_Q, WORDS]
    rows, cols, lists, room, share,
    BLOCK_Q: tl.constexpr, IN_TILE: tl.constexpr, WORDS: tl.constexpr, FULL: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes one tile if it is kept. If neighbouring queries agree it is full, and kernels do not read its bits."""
    program = tl.program_id(0).to(tl.int64)
    row, col = program // cols, program % cols
    every = tl.arange(0, COLS)
    kept = tl.load(kept_ptr + row * cols + every, mask=every < cols, other=0).to(tl.int32)
    if tl.sum(tl.where(every == col, kept, 0), 0) > 0:
        place = tl.load(indptr_ptr + row).to(tl.int64) + tl.sum(tl.where(every < col, kept, 0), 0)
        q, word = tl.arange(0, BLOCK_Q)[:, None], tl.arange(0, WORDS)[None, :]
        run = col * IN_TILE + word * IN_TILE // WORDS
        marked = tl.load(table_ptr + (row * BLOCK_Q + q) * (cols * IN_TILE) + run)
        live = tl.full([BLOCK_Q, WORDS], FULL, tl.int32)
        kind = tl.load(kind_ptr + row % rows * cols + col)
        if kind > 0:
            live = tl.load(words_ptr + ((kind - 1).to(tl.int64) * BLOCK_Q + q) * WORDS + word)
        live = tl.where(marked > 0, live, 0)
        tl.store(bits_ptr + (place * BLOCK_Q + q) * WORDS + word, live)
        full = tl.min((live == FULL).to(tl.int32).reshape(BLOCK_Q * WORDS), 0)
        tl.store(tile_ptr + place, tl.where(full > 0, 0, place + 1).to(tl.int32))
        tl.store(indices_ptr + place, col.to(tl.int32))
    used = tl.load(indptr_ptr + lists)
    for place in range(program * share, tl.minimum((program + 1) * share, room)):
        if place >= used:
            tl.store(indices_ptr + place, 0)
            tl.store(tile_ptr + place, 0)


_marking, _finding, _writing = (
    launches_of(kernel, num_warps=4, num_stages=1, most=128) for kernel in (mark_kernel, find_kernel, write_kernel)
)
