"""For each block of keys, the queries that have chosen it, in ascending order, without a sort.

An entry is `query << slot_bits(choices) | slot`: the block is there in the query's list. A block that a list has twice
counts once, at its first slot. If causal, blocks after the query are left out.
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


class Transposed(NamedTuple):
    """The lists of the blocks of all pairs of a batch element and a head that chooses."""

    entries: Tensor  # int32 [pairs * queries * choices]: of a block, then of the next
    ends: Tensor  # int32 [pairs * blocks]: where the entries of each block end
    chosen: Tensor  # int32 [pairs, queries, choices]: the lists of the queries, -1 for what is left out


def transposed(index: Tensor, blocks: int, span: int, k_len: int, causal: bool) -> Transposed:
    """The lists of `index [B, H, Nq, K]`."""
    batch, heads, q_len, choices = index.shape
    index, pairs, device = index.clamp(-1, blocks).to(torch.int32).contiguous(), batch * heads, index.device
    tiles = -(-q_len // _QUERIES)
    counts = torch.empty(pairs * blocks * tiles, dtype=torch.int32, device=device)
    entries = torch.zeros(index.numel(), dtype=torch.int32, device=device)
    chosen = torch.empty(pairs, q_len, choices, dtype=torch.int32, device=device)
    numbers = (q_len, choices, k_len - q_len, blocks, span, tiles, causal, _QUERIES)
    count_kernel[(pairs * tiles,)](index, counts, *numbers, _BLOCKS, num_warps=4, **OPTIONS)
    ends = counts.cumsum(0, dtype=torch.int32)
    fill_kernel[(pairs * tiles,)](
        index, counts, ends, entries, chosen, *numbers, slot_bits(choices), num_warps=4, **OPTIONS
    )
    return Transposed(entries, ends[tiles - 1 :: tiles].contiguous(), chosen)


def items_of(ends: Tensor, first: int, count: int, entries: int, size: int) -> tuple[Tensor, Tensor]:
    """Tiles of up to `size` entries of the `count` blocks from `first` on: `(ends of their numbers, block of each)`.

    The second has room for all tiles that `entries` entries may have, and the number `count` past the last.
    """
    begins = torch.nn.functional.pad(ends, (1, 0))[first : first + count]
    stops = (ends[first : first + count] - begins + (size - 1)).div(size, rounding_mode="floor").cumsum(0)
    room = torch.arange(entries // size + count, device=ends.device)
    return stops, torch.searchsorted(stops, room, right=True)


_SIZES = ["q_len", "choices", "shift", "blocks", "span", "tiles"]


@triton.jit(do_not_specialize=_SIZES)
def count_kernel(
    index_ptr,  # int32 [pairs, queries, choices]
    counts_ptr,  # int32 [pairs, blocks, tiles], written
    q_len, choices, shift, blocks, span, tiles, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Counts the queries of a tile that have chosen each block."""
    pair, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    query = tile * QUERIES + tl.arange(0, QUERIES)
    index_ptr += (pair * q_len + query) * choices
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        live = tl.zeros([QUERIES, BLOCKS], tl.int32)
        for slot in range(0, choices):
            chosen = tl.load(index_ptr + slot, mask=query < q_len, other=-1)
            live = live | (chosen[:, None] == block[None, :]).to(tl.int32)
        if CAUSAL:
            live = tl.where((block * span)[None, :] <= (query + shift)[:, None], live, 0)
        tl.store(counts_ptr + (pair * blocks + block) * tiles + tile, tl.sum(live, 0), mask=block < blocks)


@triton.jit(do_not_specialize=_SIZES)
def fill_kernel(
    index_ptr, counts_ptr, ends_ptr,  # as in count_kernel; int32 [pairs, blocks, tiles], the running sums of counts
    entries_ptr, chosen_ptr,  # see Transposed, written
    q_len, choices, shift, blocks, span, tiles, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Writes the entries of the queries of a tile: each behind those of earlier queries with the same block."""
    pair, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    query = tile * QUERIES + tl.arange(0, QUERIES)
    lists = (pair * q_len + query) * choices
    for slot in range(0, choices):
        block = tl.load(index_ptr + lists + slot, mask=query < q_len, other=-1)
        live = (block >= 0) & (block < blocks)
        if CAUSAL:
            live = live & (block * span <= query + shift)
        for each in range(0, slot):
            live = live & (tl.load(index_ptr + lists + each, mask=query < q_len, other=-1) != block)
        tl.store(chosen_ptr + lists + slot, tl.where(live, block, -1), mask=query < q_len)
    tl.debug_barrier()  # other threads read them
    for slot in range(0, choices):
        block = tl.load(chosen_ptr + lists + slot, mask=query < q_len, other=-1)
        at = (pair * blocks + tl.maximum(block, 0)) * tiles + tile
        place = tl.load(ends_ptr + at) - tl.load(counts_ptr + at)
        for each in range(0, choices):
            found = tl.load(chosen_ptr + lists + each, mask=query < q_len, other=-1)
            same = (found[None, :] == block[:, None]) & (query[None, :] < query[:, None])
            place += tl.sum(same.to(tl.int32), 1)
        tl.store(entries_ptr + place, (query << BITS) | slot, mask=block >= 0)
