"""Iterates over a row's list of tiles: finds the next block, and ends the list at a sequence's length."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparseflash.backends.triton.schedule.work_item import (
    ITEM_COUNT,
    ITEM_FULL,
    ITEM_FULL_BLOCK,
    ITEM_NUMBER,
    ITEM_PART,
    ITEM_PARTIAL_BLOCK,
    ITEM_PARTIAL_TILE,
    ITEM_START,
)


class Place(NamedTuple):
    """The tile of queries that a program holds."""

    batch_head: Any  # batch * Hq + head
    batch: Any
    head: Any
    kv_head: Any
    first_q: Any


@triton.jit
def listed_block(index_ptr, start, i, TOKENS: tl.constexpr, GATHERED: tl.constexpr):
    """The block of tile `start + i` of the lists; if GATHERED, the block of each token of the tile."""
    if GATHERED > 0:
        return tl.load(index_ptr + ((start + i) * (TOKENS // GATHERED) + tl.arange(0, TOKENS) // GATHERED))
    else:
        return tl.load(index_ptr + start + i)


@triton.jit
def part_of(item_ptr, parts_ptr):
    """The number of an item among all chunks of cut items, from 1; 0 if the item is not a chunk.

    Kernels also test whether `parts_ptr` is None: then the code for chunks must not be compiled.
    """
    part = 0
    if parts_ptr is not None:
        part = tl.load(item_ptr + ITEM_PART)
    return part


@triton.jit
def list_of_item(item_ptr, index_ptr, TOKENS: tl.constexpr, GATHERED: tl.constexpr):
    """The list of a work item: `((start, full, count), (first full block, first partial block, first partial tile))`.

    Unless GATHERED, the first blocks are stored in the item itself, so that their loads need not wait for the load of
    `start`.
    """
    start, full = tl.load(item_ptr + ITEM_START), tl.load(item_ptr + ITEM_FULL)
    count = tl.load(item_ptr + ITEM_COUNT)
    if GATHERED > 0:
        first = listed_block(index_ptr, start, 0, TOKENS, GATHERED)
        first_partial = listed_block(index_ptr, start, full, TOKENS, GATHERED)
    else:
        first, first_partial = tl.load(item_ptr + ITEM_FULL_BLOCK), tl.load(item_ptr + ITEM_PARTIAL_BLOCK)
    return (start, full, count), (first, first_partial, tl.load(item_ptr + ITEM_PARTIAL_TILE))


@triton.jit
def tokens_of_block(block, i, BLOCK: tl.constexpr, TOKENS: tl.constexpr, GATHERED: tl.constexpr):
    """The argument `first` for step i, in a block of BLOCK tokens that is processed in tiles of TOKENS."""
    if GATHERED > 0:
        return block * GATHERED + tl.arange(0, TOKENS) % GATHERED
    else:
        return block * BLOCK + i % (BLOCK // TOKENS) * TOKENS


@triton.jit
def partial_tile(
    index_ptr, tile_ptr, cut, at_end, first_partial, step,
    TOKENS: tl.constexpr, GATHERED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """`(block, tile number)` of the tile at this step of the masked loop.

    If a sequence's length cuts a full tile (`at_end` is 1), this tile, at index `cut`, is step 0. The partial tiles
    from index `first_partial` on follow.
    """
    at = first_partial + step - at_end
    if HAS_LENGTHS:
        at = tl.where(step < at_end, cut, at)
    return listed_block(index_ptr, at, 0, TOKENS, GATHERED), tl.load(tile_ptr + at)


@triton.jit
def count_below(index_ptr, start, stop, limit, STRIDE: tl.constexpr):
    """Counts the block numbers below `limit` in index[start * STRIDE : stop * STRIDE : STRIDE], which increases."""
    CHUNK: tl.constexpr = 128
    count = 0
    for first in range(start, stop, CHUNK):
        at = first + tl.arange(0, CHUNK)
        block = tl.load(index_ptr + at * STRIDE, mask=at < stop, other=2147483647)
        count += tl.sum((block < limit).to(tl.int32), 0)
    return count


@triton.jit
def cut_at_length(
    index_ptr, start, full, count, length, BLOCK: tl.constexpr, TOKENS: tl.constexpr, GATHERED: tl.constexpr
):  # fmt: skip
    """Removes the tiles at or past a sequence's length: `(inside, at_end, masked)`.

    A row lists `full` full tiles, then `count - full` partial tiles, each of one block of BLOCK tokens, or of TOKENS
    tokens gathered from increasing blocks. The first `inside` full tiles lie inside the length; if `at_end` is 1, the
    length cuts the next full tile. The first `masked` partial tiles begin inside the length.
    """
    UNIT: tl.constexpr = GATHERED if GATHERED > 0 else BLOCK
    PARTS: tl.constexpr = TOKENS // GATHERED if GATHERED > 0 else 1
    inside = count_below(index_ptr + (PARTS - 1), start, start + full, length // UNIT, PARTS)
    touched = count_below(index_ptr, start, start + full, tl.cdiv(length, UNIT), PARTS)
    masked = count_below(index_ptr, start + full, start + count, tl.cdiv(length, UNIT), PARTS)
    return inside, touched - inside, masked


@triton.jit
def row_item(
    item_ptr, index_ptr, lengths_ptr, lengths_stride, heads, group, row_tiles, q_len, k_len,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATHERED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """The work of a program over a tile of queries.

    Returns `(place, lists, firsts, lengths)`. lists: the start of the list, the number of full tiles, whether the
    length cuts the next tile, the number of partial tiles, and their start. firsts: from `list_of_item`. lengths: live
    queries and live keys.
    """
    item = tl.load(item_ptr + ITEM_NUMBER)
    listed, firsts = list_of_item(item_ptr, index_ptr, BLOCK_N, GATHERED)
    start, full, count = listed
    batch_head = item // row_tiles
    first_q = item % row_tiles * BLOCK_M
    batch, head = batch_head // heads, batch_head % heads
    at_end, partial = 0, count - full
    first_partial = start + full
    q_length, k_length = q_len, k_len
    if HAS_LENGTHS:
        q_length, k_length = tl.load(lengths_ptr + batch), tl.load(lengths_ptr + lengths_stride + batch)
        if first_q >= q_length:
            full, count = 0, 0
        full, at_end, partial = cut_at_length(index_ptr, start, full, count, k_length, BLOCK_K, BLOCK_N, GATHERED)
    place = Place(batch_head, batch, head, head // group, first_q)
    lists = start, full, at_end, partial, first_partial
    return place, lists, firsts, (q_length, k_length)
