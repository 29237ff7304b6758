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
    chosen = torch.full((pairs, q_len, choices), -1, dtype=torch.int32, device=device)
    numbers = (q_len, choices, k_len - q_len, blocks, span, tiles, causal, _QUERIES, _BLOCKS)
    bits = slot_bits(choices)
    count_kernel[(pairs * tiles,)](index, counts, *numbers, num_warps=4, **OPTIONS)
    ends = counts.cumsum(0, dtype=torch.int32)
    fill_kernel[(pairs * tiles,)](index, counts, ends, entries, chosen, *numbers, bits, num_warps=4, **OPTIONS)
    return Transposed(entries, ends[tiles - 1 :: tiles].contiguous(), chosen)


def items_of(ends: Tensor, first: int, count: int, entries: int, size: int) -> tuple[Tensor, Tensor]:
    """Tiles of up to `size` entries of the `count` blocks from `first` on: `(ends of their numbers, block of each)`.

    The second has room for all tiles that `entries` entries may have, and the number `count` past the last.
    """
    begins = torch.nn.functional.pad(ends, (1, 0))[first : first + count]
    stops = (ends[first : first + count] - begins + (size - 1)).div(size, rounding_mode="floor").cumsum(0)
    room = torch.arange(entries // size + count, device=ends.device)
    return stops, torch.searchsorted(stops, room, right=True)


@triton.jit
def _slots(
    index_ptr, pair, query, block, q_len, choices, shift, blocks, span,
    CAUSAL: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """`(first slots of blocks in the lists of queries [QUERIES, BLOCKS], where there is one)`."""
    slot = tl.full([QUERIES, BLOCKS], -1, tl.int32)
    index_ptr += (pair * q_len + query) * choices
    for each in range(0, choices):
        chosen = tl.load(index_ptr + each, mask=query < q_len, other=-1)
        slot = tl.where((chosen[:, None] == block[None, :]) & (slot < 0), each, slot)
    live = (slot >= 0) & (block < blocks)[None, :]
    if CAUSAL:
        live = live & ((block * span)[None, :] <= (query + shift)[:, None])
    return slot, live


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
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        _, live = _slots(
            index_ptr, pair, query, block, q_len, choices, shift, blocks, span, CAUSAL, QUERIES, BLOCKS
        )  # fmt: skip
        tl.store(counts_ptr + (pair * blocks + block) * tiles + tile, tl.sum(live.to(tl.int32), 0), mask=block < blocks)


@triton.jit(do_not_specialize=_SIZES)
def fill_kernel(
    index_ptr, counts_ptr, ends_ptr,  # as in count_kernel; int32 [pairs, blocks, tiles], the running sums of counts
    entries_ptr, chosen_ptr,  # see Transposed, written
    q_len, choices, shift, blocks, span, tiles, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Writes the entries of the queries of a tile."""
    pair, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    query = tile * QUERIES + tl.arange(0, QUERIES)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        slot, live = _slots(
            index_ptr, pair, query, block, q_len, choices, shift, blocks, span, CAUSAL, QUERIES, BLOCKS
        )  # fmt: skip
        at = (pair * blocks + block) * tiles + tile
        begin = tl.load(ends_ptr + at, mask=block < blocks, other=0)
        begin -= tl.load(counts_ptr + at, mask=block < blocks, other=0)
        one = live.to(tl.int32)
        place = begin[None, :] + tl.cumsum(one, 0) - one
        tl.store(entries_ptr + place, (query[:, None] << BITS) | slot, mask=live)
        at = (pair * q_len + query)[:, None] * choices + slot
        tl.store(chosen_ptr + at, tl.broadcast_to(block[None, :], slot.shape), mask=live)
