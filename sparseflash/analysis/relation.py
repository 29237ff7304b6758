"""Relations between tokens (who sees whom), stored as tiles.

A relation is a square boolean matrix over `count` blocks of `block` tokens: two bit matrices of full and of live tiles,
and bits for each distinct partial tile.

A sequence that ends inside a block is extended with clones of its last token. Cloning commutes with composition;
`tiles_of` removes the clones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseflash.analysis import bitrows
from sparseflash.analysis.bitrows import Bits, Index
from sparseflash.blockmask import bitmask
from sparseflash.blockmask.build import SCORES_AT_ONCE, Part
from sparseflash.blockmask.unique import number_by_first_appearance
from sparseflash.blockmask.walks import Walk, cut, words_of

TARGETS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Relation:
    """Token q sees token k iff their tile is full, or partial with that bit set.

    `full`: bit matrix `[count, count]`. `key` int64 `[E]`, increasing: `row * count + column` of the partial tiles.
    `kind` int64 `[E]`: t >= 1 for the bits `words[t - 1]`. `words` int32 `[T, block, words_per_row(block)]`: the
    distinct partial tiles in order of first appearance, so equal relations have equal arrays.
    """

    block: int
    count: int
    full: Bits
    key: Index
    kind: Index
    words: Tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Relation):
            return NotImplemented
        return (
            np.array_equal(self.full, other.full)
            and np.array_equal(self.key, other.key)
            and np.array_equal(self.kind, other.kind)
            and torch.equal(self.words, other.words)
        )

    __hash__ = None  # type: ignore[assignment]

    def partial(self, chosen: NDArray[np.bool_] | None = None, *, transposed: bool = False) -> Bits:
        key = self.key if chosen is None else self.key[chosen[self.kind - 1]]
        rows, cols = key // self.count, key % self.count
        return bitrows.of_pairs(*((cols, rows) if transposed else (rows, cols)), self.count, self.count)

    def live(self) -> Bits:
        return self.full | self.partial()

    def fills_rows(self) -> NDArray[np.bool_]:
        """The kinds of tile in which each query sees some key: bool `[T]`."""
        return np.asarray((self.words != 0).any(2).all(1).numpy(), np.bool_)

    def fills_columns(self) -> NDArray[np.bool_]:
        """The kinds of tile in which each key is seen by some query: bool `[T]`."""
        seen = np.bitwise_or.reduce(self.words.numpy(), axis=1)
        return np.asarray((seen == bitmask.full_word(self.block)).all(1), np.bool_)

    def kind_at(self, key: Index) -> Index:
        """The kinds of the tiles at these keys, which must be live; 0 for a full one."""
        if len(key) > self.count**2:
            table = np.zeros(self.count**2, np.int64)
            table[self.key] = self.kind
            return table[key]
        at = np.searchsorted(self.key, key)
        found = at < len(self.key)
        found[found] = self.key[at[found]] == key[found]
        kind = np.zeros(len(key), np.int64)
        kind[found] = self.kind[at[found]]
        return kind

    def is_everything(self) -> bool:
        return not len(self.key) and bitrows.count(self.full, self.count) == self.count**2

    def is_causally_everything(self) -> bool:
        """Whether every token sees every token up to itself, for relations that contain the identity."""
        below = bitrows.below(self.count)
        if ((self.full & below) != below).any():
            return False
        diagonal = np.unique(self.kind_at(np.arange(self.count) * (self.count + 1)))
        words = words_of(torch.from_numpy(diagonal), self.words, self.block)
        wanted = bitmask.pack(torch.ones(1, self.block, self.block, dtype=torch.bool, device="cpu").tril())
        return bool(((words & wanted) == wanted).all())


def of_walks(found: Iterable[Walk], block: int, stop: int) -> Relation:
    """The union of the identity and of the live pairs of these walks, for a sequence of `stop` tokens."""
    count = -(-stop // block)
    identity = bitmask.pack(torch.eye(block, dtype=torch.bool, device="cpu").unsqueeze(0))
    diagonal = torch.arange(count, device="cpu")
    parts: list[Part] = [(diagonal, diagonal, torch.ones_like(diagonal), identity)]
    for walk in found:
        parts.append(split(walk, block))
    keys, kinds, words, offset = [], [], [], 0
    for rows, cols, stored, bits in parts:
        number, bits = with_clones(rows, cols, stored, bits, count, stop - (count - 1) * block)
        keys.append(rows * count + cols)
        kinds.append(torch.where(number > 0, number + offset, number))
        words.append(bits)
        offset += len(bits)
    every = torch.cat(words)

    def look_up(ids: Index) -> Tensor:
        return words_of(torch.from_numpy(ids), every, block)

    key, kind = torch.cat(keys).numpy(), torch.cat(kinds).numpy()
    order = np.argsort(key, kind="stable")
    targets, sizes = np.unique(key, return_counts=True)
    united, distinct = union(sizes, lambda at: kind[order[at]], look_up, block)
    return settled(block, count, bitrows.zeros(count, count), [(targets, united, distinct)])


def split(walk: Walk, block: int) -> Part:
    """The tiles of a walk in square blocks, which must divide the mask's; dead ones are dropped."""
    down, across = walk.block_q // block, walk.block_k // block
    if down == across == 1:
        dead = (walk.bits == 0).all(-1).all(-1)
        keep = ~torch.cat([dead.new_zeros(1), dead])[walk.kind]
        return walk.rows[keep], walk.cols[keep], walk.kind[keep], walk.bits
    found = []
    for words in walk.bits.split(max(1, SCORES_AT_ONCE // (walk.block_q * walk.block_k))):
        live = bitmask.unpack(words, walk.block_k).view(-1, down, block, across, block).transpose(2, 3)
        found.append(bitmask.pack(live))
    words = torch.cat(found).flatten(0, 2) if found else walk.bits.new_zeros(0, block, bitmask.words_per_row(block))
    dead, full = (words == 0).all(-1).all(-1), (words == bitmask.full_word(block)).all(-1).all(-1)
    number = torch.where(full, 0, torch.arange(1, len(words) + 1, device="cpu"))
    number[dead] = -1
    table = torch.cat([number.new_zeros(1, down, across), number.view(-1, down, across)])[walk.kind]
    tile, a, b = (table >= 0).nonzero(as_tuple=True)
    return walk.rows[tile] * down + a, walk.cols[tile] * across + b, table[tile, a, b], words


def with_clones(rows: Tensor, cols: Tensor, kind: Tensor, bits: Tensor, count: int, live: int) -> tuple[Tensor, Tensor]:
    """The kinds and words with the last block, where `live` tokens exist, filled up with clones of the last token."""
    block = bits.shape[1]
    if live == block:
        return kind, bits
    last_q, last_k = rows == count - 1, cols == count - 1
    end = last_q.long() + 2 * last_k.long()
    chosen = end > 0
    pairs, which = torch.unique(kind[chosen] * 4 + end[chosen], return_inverse=True)
    found = []
    for some in pairs.split(max(1, SCORES_AT_ONCE // block**2)):
        patch = bitmask.unpack(words_of(some // 4, bits, block), block)
        at_q, at_k = some % 4 % 2 == 1, some % 4 >= 2
        patch[at_q, live:] = patch[at_q, live - 1 : live]
        patch[at_k, :, live:] = patch[at_k, :, live - 1 : live]
        found.append(bitmask.pack(patch))
    kind = kind.clone()
    kind[chosen] = which + len(bits) + 1
    return kind, torch.cat([bits, *found])


def tiles_of(relation: Relation, stop: int) -> Part:
    """The tiles of a relation over a sequence of `stop` tokens, without clones."""
    rows, cols = bitrows.pairs(relation.full, relation.count)
    partial_rows, partial_cols = relation.key // relation.count, relation.key % relation.count
    i = torch.from_numpy(np.concatenate([rows, partial_rows]))
    j = torch.from_numpy(np.concatenate([cols, partial_cols]))
    kind = torch.from_numpy(np.concatenate([np.zeros(len(rows), np.int64), relation.kind]))
    live, last = stop - (relation.count - 1) * relation.block, relation.count - 1
    if live == relation.block:
        return i, j, kind, relation.words
    end = (i == last).long() + 2 * (j == last).long()
    return i, j, *cut(kind, end, relation.words, live, live, relation.block)


def union(
    sizes: Index, ids: Callable[[Index], Index], look_up: Callable[[Index], Tensor], block: int
) -> tuple[Index, Tensor]:
    """The union of the tiles of each group: `(kind [G], words)`, where kind 0 is full and -1 dead.

    Group g has `sizes[g]` >= 1 consecutive members. `ids` returns the ids of members at some positions, `look_up` the
    words of distinct ids. All groups take their members in step, so equal unions are computed once, and a full group
    stops.
    """
    starts = np.cumsum(sizes) - sizes
    groups = np.arange(len(sizes))
    result = np.full(len(sizes), -1, np.int64)
    emitted = [torch.zeros(0, block, bitmask.words_per_row(block), dtype=torch.int32, device="cpu")]
    offset = 1
    distinct, state = np.unique(ids(starts), return_inverse=True) if len(sizes) else (starts, starts)
    words = look_up(distinct)
    taken = 1
    while len(groups):
        full = (words == bitmask.full_word(block)).all(-1).all(-1).numpy()
        done = full[state] | (sizes[groups] == taken)
        if done.any():
            used, where = np.unique(state[done], return_inverse=True)
            result[groups[done]] = np.where(full[state[done]], 0, where + offset)
            emitted.append(words[torch.from_numpy(used)])
            offset += len(used)
            groups, state = groups[~done], state[~done]
        if not len(groups):
            break
        new, member = np.unique(ids(starts[groups] + taken), return_inverse=True)
        pair, which = np.unique(state * len(new) + member, return_inverse=True)
        members = look_up(new)
        joined = words[torch.from_numpy(pair // len(new))] | members[torch.from_numpy(pair % len(new))]
        words, inverse = bitmask.deduplicate(joined)
        state = inverse.numpy()[which]
        taken += 1
    every = torch.cat(emitted)
    dead = (every == 0).all(-1).all(-1).numpy()
    result[(result > 0) & np.concatenate([[False], dead])[np.maximum(result, 0)]] = -1
    return result, every


def settled(block: int, count: int, full: Bits, found: list[tuple[Index, Index, Tensor]]) -> Relation:
    """The relation of these full tiles and unions of other tiles, each `(key, kind, words)` as from `union`."""
    keys, kinds = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    words = [torch.zeros(0, block, bitmask.words_per_row(block), dtype=torch.int32, device="cpu")]
    offset = 0
    for key, kind, some in found:
        now_full = key[kind == 0]
        full |= bitrows.of_pairs(now_full // count, now_full % count, count, count)
        keys.append(key[kind > 0])
        kinds.append(kind[kind > 0] + offset)
        words.append(some)
        offset += len(some)
    key, kind = np.concatenate(keys), np.concatenate(kinds)
    order = np.argsort(key, kind="stable")
    key, kind = key[order], kind[order]
    used, which = np.unique(kind, return_inverse=True)
    distinct, inverse = bitmask.deduplicate(torch.cat(words)[torch.from_numpy(used - 1)])
    number, first = number_by_first_appearance(inverse[torch.from_numpy(which)])
    chosen = inverse[torch.from_numpy(which)][first]
    return Relation(block, count, full, key, number.numpy() + 1, distinct[chosen])
