"""For each block of keys, the queries that have chosen it, in ascending order, without a sort.

An entry is `query << slot_bits(choices) | slot`: the block is there in the query's list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.launcher import OPTIONS

_QUERIES, _BLOCKS = 128, 64  # of a tile


def slot_bits(choices: int) -> int:
    """The bits of an entry that hold the slot."""
    return (choices - 1).bit_length()


class Chosen(NamedTuple):
    """The lists of queries, of all pairs of a batch element and a head that chooses: each block once, if causal without
    those after the query, -1 at the end.
    """

    blocks: Tensor  # int32 [pairs, queries, choices]
    counts: Tensor  # int32 [pairs, queries]


class Transposed(NamedTuple):
    """The lists of blocks."""

    entries: Tensor  # int32 [pairs * queries * choices]: of a block, then of the next
    ends: Tensor  # int32 [pairs * blocks]: where the entries of each block end


def chosen_of(index: Tensor, blocks: int, span: int, k_len: int, causal: bool) -> Chosen:
    """The lists of `index [B, H, Nq, K]`."""
    batch, heads, q_len, choices = index.shape
    index, pairs, device = index.clamp(-1, blocks).to(torch.int32).contiguous(), batch * heads, index.device
    chosen = Chosen(
        torch.empty(pairs, q_len, choices, dtype=torch.int32, device=device),
        torch.empty(pairs, q_len, dtype=torch.int32, device=device),
    )
    tiles = -(-q_len // _QUERIES)
    choose_kernel[(pairs * tiles,)](
        index, *chosen, q_len, choices, k_len - q_len, blocks, span, tiles, causal, _QUERIES, num_warps=4, **OPTIONS
    )
    return chosen


def transposed(chosen: Chosen, blocks: int) -> Transposed:
    """The lists of blocks of the lists of queries."""
    pairs, q_len, choices = chosen.blocks.shape
    device, tiles = chosen.blocks.device, -(-q_len // _QUERIES)
    counts = torch.empty(pairs * blocks * tiles, dtype=torch.int32, device=device)
    entries = torch.zeros(chosen.blocks.numel(), dtype=torch.int32, device=device)
    numbers = (q_len, choices, blocks, tiles, _QUERIES)
    count_kernel[(pairs * tiles,)](chosen.blocks, counts, *numbers, _BLOCKS, num_warps=4, **OPTIONS)
    ends = counts.cumsum(0, dtype=torch.int32)
    fill_kernel[(pairs * tiles,)](
        chosen.blocks, counts, ends, entries, *numbers, slot_bits(choices), num_warps=4, **OPTIONS
    )
    return Transposed(entries, ends[tiles - 1 :: tiles].contiguous())


def items_of(ends: Tensor, first: int, count: int, entries: int, size: int) -> tuple[Tensor, Tensor]:
    """Tiles of up to `size` entries of the `count` blocks from `first` on: `(ends of their numbers, block of each)`.

    The second has room for all tiles that `entries` entries may have, and the number `count` past the last.
    """
    begins = torch.nn.functional.pad(ends, (1, 0))[first : first + count]
    stops = (ends[first : first + count] - begins + (size - 1)).div(size, rounding_mode="floor").cumsum(0)
    room = torch.arange(entries // size + count, device=ends.device)
    return stops, torch.searchsorted(stops, room, right=True)


@triton.jit(do_not_specialize=["q_len", "choices", "shift", "blocks", "span", "tiles"])
def choose_kernel(
    index_ptr,  # int32 [pairs, queries, choices]
    chosen_ptr, counts_ptr,  # see Chosen, written
    q_len, choices, shift, blocks, span, tiles, CAUSAL: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Writes the lists of a tile of queries."""
    pair, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    query = tile * QUERIES + tl.arange(0, QUERIES)
    lists = (pair * q_len + query) * choices
    count = tl.zeros([QUERIES], tl.int32)
    for slot in range(0, choices):
        block = tl.load(index_ptr + lists + slot, mask=query < q_len, other=-1)
        live = (block >= 0) & (block < blocks)
        if CAUSAL:
            live = live & (block * span <= query + shift)
        for each in range(0, slot):
            live = live & (tl.load(index_ptr + lists + each, mask=query < q_len, other=-1) != block)
        tl.store(chosen_ptr + lists + count, block, mask=live)
        count += live.to(tl.int32)
    for slot in range(0, choices):
        tl.store(chosen_ptr + lists + slot, tl.full([QUERIES], -1, tl.int32), mask=(query < q_len) & (slot >= count))
    tl.store(counts_ptr + pair * q_len + query, count, mask=query < q_len)


@triton.jit(do_not_specialize=["q_len", "choices", "blocks", "tiles"])
def count_kernel(
    chosen_ptr,  # see Chosen
    counts_ptr,  # int32 [pairs, blocks, tiles], written
    q_len, choices, blocks, tiles, QUERIES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Counts the queries of a tile that have chosen each block."""
    pair, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    query = tile * QUERIES + tl.arange(0, QUERIES)
    chosen_ptr += (pair * q_len + query) * choices
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        live = tl.zeros([QUERIES, BLOCKS], tl.int32)
        for slot in range(0, choices):
            chosen = tl.load(chosen_ptr + slot, mask=query < q_len, other=-1)
            live = live | (chosen[:, None] == block[None, :]).to(tl.int32)
        tl.store(counts_ptr + (pair * blocks + block) * tiles + tile, tl.sum(live, 0), mask=block < blocks)


@triton.jit(do_not_specialize=["q_len", "choices", "blocks", "tiles"])
def fill_kernel(
    chosen_ptr, counts_ptr, ends_ptr,  # as in count_kernel; int32 [pairs, blocks, tiles], the running sums of counts
    entries_ptr,  # see Transposed, written
    q_len, choices, blocks, tiles, QUERIES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Writes the entries of the queries of a tile: each behind those of earlier queries with the same block."""
    pair, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    query = tile * QUERIES + tl.arange(0, QUERIES)
    chosen_ptr += (pair * q_len + query) * choices
    for slot in range(0, choices):
        block = tl.load(chosen_ptr + slot, mask=query < q_len, other=-1)
        at = (pair * blocks + tl.maximum(block, 0)) * tiles + tile
        place = tl.load(ends_ptr + at) - tl.load(counts_ptr + at)
        for each in range(0, choices):
            found = tl.load(chosen_ptr + each, mask=query < q_len, other=-1)
            same = (found[None, :] == block[:, None]) & (query[None, :] < query[:, None])
            place += tl.sum(same.to(tl.int32), 1)
        tl.store(entries_ptr + place, (query << BITS) | slot, mask=block >= 0)
