"""For each block of keys, the queries that have chosen it, in ascending order, without a sort.

A bit says whether a query has chosen a block; so the order in which programs set bits does not matter. An entry's place
is the number of entries of earlier blocks, and of earlier queries with this block.

An entry is `query << slot_bits(choices) | slot`, where `slot` is the block's place in the query's list.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.launcher import OPTIONS
from sparseflash.backends.triton.selected.places import count_kernel, ones

_QUERIES = 128  # of a tile of the kernel that chooses
_WORDS = 32  # of 32 queries each, whose bits are counted at once
_ENTRIES = 128  # of a program
_SCRATCH = 256 << 20  # bytes for the bits of the pairs, or of the blocks of one pair, that are listed together


def slot_bits(choices: int) -> int:
    """The bits of an entry that hold the slot."""
    return (choices - 1).bit_length()


class Chosen(NamedTuple):
    """The blocks that each query has chosen, for all pairs of a batch element and a head that chooses: without
    repetitions, if causal without blocks after the query, and with -1 at the end.
    """

    blocks: Tensor  # int32 [pairs, queries, choices]
    counts: Tensor  # int32 [pairs, queries]


class Transposed(NamedTuple):
    """The queries that have chosen each block."""

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
    """The queries of each block, from the blocks of each query."""
    pairs, q_len, choices = chosen.blocks.shape
    device, groups = chosen.blocks.device, -(-q_len // (32 * _WORDS))
    of_block = 4 * groups * _WORDS  # bytes
    some_pairs, some_blocks = max(1, _SCRATCH // (of_block * blocks)), max(1, min(blocks, _SCRATCH // of_block))
    bits = torch.empty(min(some_pairs, pairs) * some_blocks * groups, _WORDS, dtype=torch.int32, device=device)
    counts = torch.empty(len(bits), dtype=torch.int32, device=device)
    entries = torch.empty(chosen.blocks.numel(), dtype=torch.int32, device=device)
    ends = torch.empty(pairs, blocks, dtype=torch.int32, device=device)
    before: Tensor | None = None
    for pair, first in itertools.product(range(0, pairs, some_pairs), range(0, blocks, some_blocks)):
        some, found = chosen.blocks[pair : pair + some_pairs], ends[pair : pair + some_pairs, first:][:, :some_blocks]
        rows, numbers = found.numel() * groups, (q_len, choices, first, found.shape[1], groups, some.numel())
        programs = (-(-some.numel() // _ENTRIES),)
        mark_kernel[programs](some, bits[:rows].zero_(), *numbers, _WORDS, _ENTRIES, num_warps=4, **OPTIONS)
        count_kernel[(-(-rows // 64),)](bits, counts, rows, _WORDS, 64, num_warps=4, **OPTIONS)
        sums = counts[:rows].cumsum(0, dtype=torch.int32)
        if before is not None:
            sums += before
        place_kernel[programs](
            some, bits, counts, sums, entries, *numbers, slot_bits(choices), _WORDS, _ENTRIES, num_warps=4, **OPTIONS
        )
        found.copy_(sums[groups - 1 :: groups].view_as(found))
        before = sums[-1:]
    return Transposed(entries, ends.view(-1))


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


@triton.jit
def _entries_of_program(
    chosen_ptr, q_len, choices, first, blocks, groups, count, ENTRIES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """For each entry of a program its query, its slot, the place of its block's bits of this group of queries, and
    whether its block is one of `blocks` from `first` on.
    """
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    block = tl.load(chosen_ptr + at, mask=(at >= 0) & (at < count), other=-1) - first  # negative past 2^31
    live = (block >= 0) & (block < blocks)
    row = at // choices
    query = row % q_len
    block_of_all = (row // q_len).to(tl.int64) * blocks + tl.where(live, block, 0)
    return query, at % choices, block_of_all * groups + query // (32 * WORDS), live


@triton.jit(do_not_specialize=["q_len", "choices", "first", "blocks", "groups", "count"])
def mark_kernel(
    chosen_ptr,  # see Chosen: the lists of some pairs
    bits_ptr,  # int32 [pairs, blocks, groups, WORDS], zeros: of the blocks from `first` on
    q_len, choices, first, blocks, groups, count, WORDS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Sets the bits of some entries."""
    query, _, group, live = _entries_of_program(
        chosen_ptr, q_len, choices, first, blocks, groups, count, ENTRIES, WORDS
    )
    bit = (tl.full([ENTRIES], 1, tl.int32) << (query % 32)).to(tl.int32)
    tl.atomic_or(bits_ptr + group * WORDS + query // 32 % WORDS, bit, mask=live, sem="relaxed")


@triton.jit(do_not_specialize=["q_len", "choices", "first", "blocks", "groups", "count"])
def place_kernel(
    chosen_ptr, bits_ptr, counts_ptr,  # as in mark_kernel and count_kernel
    sums_ptr,  # int32 [pairs, blocks, groups]: the running sums of counts, with those of earlier pairs
    entries_ptr,  # see Transposed, written
    q_len, choices, first, blocks, groups, count, BITS: tl.constexpr, WORDS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Writes some entries, each behind those of earlier queries with the same block."""
    query, slot, group, live = _entries_of_program(
        chosen_ptr, q_len, choices, first, blocks, groups, count, ENTRIES, WORDS
    )
    place = tl.load(sums_ptr + group, mask=live, other=0) - tl.load(counts_ptr + group, mask=live, other=0)
    word = tl.arange(0, WORDS)[None, :]
    own = (query // 32 % WORDS)[:, None]
    words = tl.load(bits_ptr + (group * WORDS)[:, None] + word, mask=live[:, None] & (word <= own), other=0)
    earlier = (tl.full([ENTRIES], 1, tl.int32) << (query % 32)).to(tl.int32) - 1  # the bits below this query's
    place += tl.sum(ones(tl.where(word == own, words & earlier[:, None], words)), 1)
    tl.store(entries_ptr + place, (query << BITS) | slot, mask=live)
