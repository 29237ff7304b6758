"""One mask made of several, each at its own place in a longer sequence of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import alternatives
from sparseflash.blockmask.ops.padding import bake_lengths
from sparseflash.blockmask.ops.reblock import to_one_block
from sparseflash.blockmask.ops.tilelist import TileList, mask_of
from sparseflash.blockmask.patterns import Integers
from sparseflash.blockmask.threads import on_one_thread
from sparseflash.blockmask.unique import distinct, first_combinations

Words = NDArray[np.uint32]  # unsigned, because a shift to the right must not copy the sign bit

_WORDS_AT_ONCE = 1 << 16  # words made at a time, so that temporaries fit in a CPU's caches


# A mask and the tokens where its first query and key go; then, if only its first queries and keys are placed, their
# numbers.
Placed = tuple[BlockMask, int, int] | tuple[BlockMask, int, int, int, int]


@on_one_thread
def place(parts: Sequence[Placed], q_len: int, k_len: int) -> BlockMask:
    """The mask of `q_len x k_len` scores in which each part is live at its place.

    >>> from sparseflash import masks
    >>> causal = masks.causal(3, block=16)
    >>> place([(causal, 0, 0), (causal, 3, 3)], 6, 6) == masks.documents([3, 3], causal=True, block=16)
    True

    The parts must be at least one, lie inside, share no score, have at most one batch element, and the same number of
    heads or one. Places need not be multiples of the block: bits are shifted once for each distinct combination of
    tiles and place within a block. Time and memory are proportional to the tiles of all parts; no operation runs part
    by part.
    """
    once = {id(part[0]): part[0] for part in parts}
    masks = to_one_block([bake_lengths(mask.canonical()) for mask in once.values()])
    heads = max(mask.shape[1] for mask in masks)
    for mask in masks:
        if mask.shape[0] != 1 or mask.shape[1] not in (1, heads):
            raise ValueError(
                f"the masks of sequences must be of one batch element and of {alternatives((1, heads), 'head')}; got "
                f"one of {mask.shape[0]} batch elements and {mask.shape[1]} heads."
            )
    block_q, block_k = masks[0].block_q, masks[0].block_k
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    whole = {key: (index, mask.q_len, mask.k_len) for index, (key, mask) in enumerate(once.items())}
    placed = [(whole[id(part[0])][0], *part[1:3], *(part[3:] or whole[id(part[0])][1:])) for part in parts]
    source, q_start, k_start, q_size, k_size = np.array(placed, dtype=np.int64).T
    # The blocks of the result cut a part's tiles where it does not begin at a block: the first block inside the part
    # begins with its query `q_cut` and key `k_cut`. Equal parts that are cut alike are cut once.
    codes = source, -q_start % block_q, -k_start % block_k, q_size, k_size
    which, first = first_combinations(codes)
    cut = _cut(_listed(masks, heads), masks, *(code[first] for code in codes))
    part, tile = _runs(cut.start[which], cut.start[which + 1])
    row = cut.head[tile] * row_blocks + cut.row[tile] + (-(-q_start // block_q))[part]
    col = cut.col[tile] + (-(-k_start // block_k))[part]
    row, col, kind, words = _merged(row, col, cut.kind[tile], cut.words, col_blocks)
    return mask_of(TileList(
        q_len, k_len, block_q, block_k,
        torch.from_numpy(row), torch.from_numpy(col), torch.from_numpy(kind), torch.from_numpy(words.view(np.int32)),
        torch.arange(heads, device="cpu").view(1, heads), heads,
    ))  # fmt: skip


class _Tiles(NamedTuple):
    """Tiles of several masks: the tiles of mask m are `start[m]` to `start[m + 1]`."""

    start: Integers
    head: Integers
    row: Integers
    col: Integers
    kind: Integers  # 0 for a full tile, t > 0 for `words[t - 1]`
    words: Words


def _listed(masks: Sequence[BlockMask], heads: int) -> _Tiles:
    listed: list[tuple[Integers, ...]] = []
    known = 0
    for mask in masks:
        indptr, col, tile = (x.numpy() for x in (mask.indptr, mask.indices, mask.tile))
        own = mask.blocks[0]
        rows = (np.broadcast_to(mask.pattern.numpy()[0], heads)[:, None] * own + np.arange(own)).reshape(-1)
        which, entry = _runs(indptr[rows], indptr[rows + 1])
        kind = tile[entry].astype(np.int64)
        listed.append((which // own, which % own, col[entry].astype(np.int64), kind + (kind > 0) * known))
        known += len(mask.bits)
    start = np.cumsum([0, *(len(column[0]) for column in listed)])
    head, row, col, kind = (np.concatenate(column) for column in zip(*listed, strict=True))
    # Masks of one pattern have most tiles in common, and what is made of equal tiles is made once.
    bits, number = bitmask.deduplicate(torch.cat([mask.bits for mask in masks]))
    return _Tiles(start, head, row, col, np.append(0, number.numpy() + 1)[kind], bits.numpy().view(np.uint32))


def _cut(
    tiles: _Tiles, masks: Sequence[BlockMask], source: Integers, q_cut: Integers, k_cut: Integers, q_size: Integers,
    k_size: Integers,
) -> _Tiles:  # fmt: skip
    """The tiles of the first `q_size[c]` queries and `k_size[c]` keys of masks `source[c]`, cut at blocks that begin
    with query `q_cut[c]` and key `k_cut[c]`.

    Block rows and columns are counted from those blocks, so the tokens before them are in block -1.
    """
    block_q, block_k = masks[0].block_q, masks[0].block_k
    q_lens, k_lens = np.array([(mask.q_len, mask.k_len) for mask in masks]).T
    which, entry = _runs(tiles.start[source], tiles.start[source + 1])
    is_inside = (tiles.row[entry] * block_q < q_size[which]) & (tiles.col[entry] * block_k < k_size[which])
    which, entry = which[is_inside], entry[is_inside]
    last_row, last_col = ((q_size - 1 - q_cut) // block_q)[which], ((k_size - 1 - k_cut) // block_k)[which]
    # A new tile has up to four parts, each of one old tile: the lower part of a tile and the upper one of the tile
    # below it, and likewise the right and the left part.
    heads, rows, cols = (int(x.max(initial=0)) + 2 for x in (tiles.head, tiles.row, tiles.col))
    keys, kinds, slots = [], [], []
    for slot in range(4):
        i, j = tiles.row[entry] - (slot >> 1), tiles.col[entry] - (slot & 1)
        there = (i <= last_row) & (j <= last_col)
        if slot >> 1:
            there &= q_cut[which] > 0
        if slot & 1:
            there &= k_cut[which] > 0
        i, j = i[there], j[there]
        keys.append(((which[there] * heads + tiles.head[entry[there]]) * rows + i + 1) * cols + j + 1)
        kinds.append(tiles.kind[entry[there]])
        slots.append(np.full(len(i), slot))
    key, group = _distinct(np.concatenate(keys))
    known = bitmask.choices(torch.from_numpy(tiles.words.view(np.int32)), block_k).numpy().view(np.uint32)
    of_combination = key // (cols * rows * heads)
    head, row, col = key // (cols * rows) % heads, key // cols % rows - 1, key % cols - 1
    recipe = np.full((len(key), 7), len(known) - 1, dtype=np.int32)
    recipe[group, np.concatenate(slots)] = np.concatenate(kinds)
    recipe[:, 4] = k_cut[of_combination] * block_q + q_cut[of_combination]
    # How many of the first queries and keys of the tile are inside; all where the mask itself ends.
    for slot, size, cut, place, block, lens in (
        (5, q_size, q_cut, row, block_q, q_lens),
        (6, k_size, k_cut, col, block_k, k_lens),
    ):
        ends = size < lens[source]
        recipe[:, slot] = np.where(
            ends[of_combination], np.clip((size - cut)[of_combination] - place * block, 0, block), block
        )
    distinct_recipes, number = bitmask.deduplicate(torch.from_numpy(recipe).unsqueeze(-1))
    words = _words_of(known, distinct_recipes.squeeze(-1).numpy().astype(np.int64), block_k)
    start = np.searchsorted(of_combination, np.arange(len(source) + 1))
    return _Tiles(start, head, row, col, number.numpy() + 1, words)


def _words_of(known: Words, recipes: Integers, block_k: int) -> Words:
    """The words `[C, block_q, W]` of tiles made of four tiles each; a recipe has their numbers, then
    `k_cut * block_q + q_cut`, and the numbers of queries and keys that are inside.
    """
    block_q, width = known.shape[1:]
    which, first = first_combinations([*recipes[:, :5].T])  # most recipes differ in the ends alone
    words = _moved(known, recipes[first, :5], block_k)[which]
    ended = np.flatnonzero((recipes[:, 5] < block_q) | (recipes[:, 6] < block_k))
    at_once = max(1, _WORDS_AT_ONCE // known[0].size)
    for at in range(0, len(ended), at_once):
        some = ended[at : at + at_once]
        inside = np.arange(block_q) < recipes[some, 5, None]
        live, made = bitmask.below(recipes[some, 6], block_k).view(np.uint32), words[some]
        for word in range(width):  # with the queries of a tile in one loop
            made[:, :, word] &= np.where(inside, live[:, word, None], np.uint32(0))
        words[some] = made
    return words


def _moved(known: Words, recipes: Integers, block_k: int) -> Words:
    """The moved tiles, before scores past the ends are cut off."""
    block_q, width = known.shape[1:]
    columns = np.ascontiguousarray(known.reshape(-1, width).T)
    words = np.empty((len(recipes), block_q, width), dtype=np.uint32)
    # Tiles whose words move by the same number of whole words are made together.
    skipped = recipes[:, 4] // (block_q * bitmask.WORD)
    order = skipped.argsort(kind="stable")
    ends = np.searchsorted(skipped[order], np.arange(1, width + 1))
    at_once = max(1, _WORDS_AT_ONCE // known[0].size)
    for skip, group in enumerate(np.split(order, ends[:-1])):
        for at in range(0, len(group), at_once):
            some = group[at : at + at_once]
            k_cut, q_cut = np.divmod(recipes[some, 4, None], block_q)
            row = np.arange(block_q) + q_cut
            left, right = (
                np.where(row < block_q, recipes[some, slot, None], recipes[some, slot + 2, None] - 1) * block_q + row
                for slot in range(2)
            )
            shift = (k_cut - skip * bitmask.WORD).astype(np.uint32)
            if block_k < bitmask.WORD:
                both = columns[0][left] | columns[0][right] << block_k
                words[some, :, 0] = both >> shift & bitmask.full_word(block_k)
                continue
            high = columns[skip][left]
            for word in range(width):  # a shift by all 32 bits, where `shift` is 0, gives 0
                low, number = high, skip + word + 1
                high = columns[number][left] if number < width else columns[number - width][right]
                words[some, :, word] = low >> shift | high << (bitmask.WORD - shift)
    return words


def _merged(
    row: Integers, col: Integers, kind: Integers, words: Words, col_blocks: int
) -> tuple[Integers, Integers, Integers, Words]:
    """None of these is full, because parts share no score."""
    key = row * col_blocks + col
    order = key.argsort(kind="stable")
    key, kind = key[order], kind[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    count = np.diff(first, append=len(key))
    shared = np.flatnonzero(count > 1)
    union = words[kind[first[shared]] - 1]
    for more in range(1, int(count.max(initial=0))):
        still = np.flatnonzero(count[shared] > more)
        union[still] |= words[kind[first[shared[still]] + more] - 1]
    kind = kind[first]
    kind[shared] = np.arange(len(words) + 1, len(words) + 1 + len(shared))
    return key[first] // col_blocks, key[first] % col_blocks, kind, np.concatenate([words, union])


def _distinct(values: Integers) -> tuple[Integers, Integers]:
    found, number = distinct(torch.from_numpy(values))
    return found.numpy(), number.numpy()


def _runs(start: Integers, stop: Integers) -> tuple[Integers, Integers]:
    """`(which, index)`: all integers from `start[n]` to before `stop[n]`, and the n of each."""
    count = stop - start
    which = np.repeat(np.arange(len(count)), count)
    return which, np.arange(len(which)) + (start - (count.cumsum() - count))[which]
