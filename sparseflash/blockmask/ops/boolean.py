"""Union, intersection, symmetric difference, difference and complement of the live scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.ops.padding import bake_lengths
from sparseflash.blockmask.ops.reblock import to_one_block
from sparseflash.blockmask.ops.tilelist import TileList, in_chunks, mask_of, take_patterns, tiles_of
from sparseflash.blockmask.stats import pattern_count
from sparseflash.blockmask.unique import distinct, number_by_first_appearance


def intersection(a: BlockMask, b: BlockMask) -> BlockMask:
    """`a & b`. A score past either length is dead, so the smaller length applies."""
    batch, _ = _shape_of_both(a, b)
    a, b, lengths = a.canonical(), b.canonical(), None
    if a.lengths is not None and b.lengths is not None:
        lengths = torch.minimum(a.lengths.expand(2, batch), b.lengths.expand(2, batch))
    elif a.lengths is not None or b.lengths is not None:
        lengths = (a.lengths if a.lengths is not None else b.lengths).expand(2, batch)  # type: ignore[union-attr]
    return _combined(torch.bitwise_and, a, b, lengths, only_a=False, only_b=False)


def union(a: BlockMask, b: BlockMask) -> BlockMask:
    """`a | b`."""
    a, b, lengths = _with_one_padding(a, b)
    return _combined(torch.bitwise_or, a, b, lengths, only_a=True, only_b=True)


def symmetric_difference(a: BlockMask, b: BlockMask) -> BlockMask:
    """`a ^ b`."""
    a, b, lengths = _with_one_padding(a, b)
    return _combined(torch.bitwise_xor, a, b, lengths, only_a=True, only_b=True)


def difference(a: BlockMask, b: BlockMask) -> BlockMask:
    """`a & ~b`. Scores in a's padding are dead in the result, so at most b's lengths are written into bits."""
    batch, _ = _shape_of_both(a, b)
    a, b = a.canonical(), b.canonical()
    lengths = None if a.lengths is None else a.lengths.expand(2, batch)
    if b.lengths is not None and not (lengths is not None and bool((b.lengths.expand(2, batch) >= lengths).all())):
        b = bake_lengths(b)
    return _combined(lambda x, y: x & ~y, a, b, lengths, only_a=True, only_b=False)


def complement(mask: BlockMask) -> BlockMask:
    """`~mask`."""
    mask = bake_lengths(mask)
    stored, (row_blocks, col_blocks) = tiles_of(mask), mask.blocks
    count = stored.patterns * row_blocks * col_blocks
    kind = torch.zeros(count, dtype=torch.int64, device=mask.device)  # tiles that are not stored become full
    key = stored.row * col_blocks + stored.col
    kind[key] = torch.where(stored.kind > 0, stored.kind, -1)
    key = (kind >= 0).nonzero().squeeze(1)
    made = TileList(
        mask.q_len, mask.k_len, mask.block_q, mask.block_k,
        key // col_blocks, key % col_blocks, kind[key], mask.bits ^ bitmask.full_word(mask.block_k),
        stored.pattern, stored.patterns,
    )  # fmt: skip
    return mask_of(made)


def _shape_of_both(a: BlockMask, b: BlockMask) -> tuple[int, int]:
    """`(batch, heads)` of the combination of two masks; raises ValueError unless they can be combined."""
    if (a.q_len, a.k_len) != (b.q_len, b.k_len):
        raise ValueError(
            f"masks must have the same q_len and k_len to be combined; got {a.q_len} x {a.k_len} and "
            f"{b.q_len} x {b.k_len}."
        )
    if a.device != b.device:
        raise ValueError(f"masks must be on one device to be combined; got {a.device} and {b.device}.")
    sizes = []
    for mine, theirs in zip(a.shape[:2], b.shape[:2], strict=True):
        if mine != theirs and 1 not in (mine, theirs):
            raise ValueError(
                "masks must have the same batch size and number of heads, or 1, to be combined; got "
                f"{a.shape[0]} x {a.shape[1]} and {b.shape[0]} x {b.shape[1]} (batch x heads)."
            )
        sizes.append(theirs if mine == 1 else mine)
    return sizes[0], sizes[1]


def _with_one_padding(a: BlockMask, b: BlockMask) -> tuple[BlockMask, BlockMask, Tensor | None]:
    batch, _ = _shape_of_both(a, b)
    a, b = a.canonical(), b.canonical()
    if a.lengths is not None and b.lengths is not None:
        lengths = a.lengths.expand(2, batch)
        if a.lengths is b.lengths or torch.equal(lengths, b.lengths.expand(2, batch)):
            return a, b, lengths
    return bake_lengths(a), bake_lengths(b), None


def _combined(
    operation: Callable[[Tensor, Tensor], Tensor],
    a: BlockMask,
    b: BlockMask,
    lengths: Tensor | None,
    *,
    only_a: bool,
    only_b: bool,
) -> BlockMask:
    """Applies a bitwise operation to each score. `only_a`: tiles that only a has are kept, too; `only_b` likewise."""
    a, b = to_one_block([a, b])
    pair = a.pattern.long() * pattern_count(b) + b.pattern.long()
    number, first = number_by_first_appearance(pair.reshape(-1))
    chosen = pair.reshape(-1)[first]
    patterns_a, patterns_b = chosen // pattern_count(b), chosen % pattern_count(b)
    row, col, kind_a, kind_b = _joined(a, b, patterns_a, patterns_b, only_a, only_b)
    recipes, which = distinct(kind_a * (len(b.bits) + 2) + kind_b)
    words_a, words_b = bitmask.choices(a.bits, a.block_k), bitmask.choices(b.bits, b.block_k)
    words = in_chunks(
        lambda some: operation(words_a[some // len(words_b)], words_b[some % len(words_b)]), recipes, words_a[0].numel()
    )
    made = TileList(
        a.q_len, a.k_len, a.block_q, a.block_k, row, col, which + 1, words, number.view(pair.shape), len(first)
    )
    return mask_of(made, lengths)


def _joined(
    a: BlockMask, b: BlockMask, patterns_a: Tensor, patterns_b: Tensor, only_a: bool, only_b: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not only_a and not only_b and len(a.indices) > len(b.indices):
        # Iterate over the shorter list and search the longer one: a window & causal costs only as much as the window.
        row, col, kind_b, kind_a = _joined(b, a, patterns_b, patterns_a, only_a, only_b)
        return row, col, kind_a, kind_b
    row, entry = take_patterns(a, patterns_a)
    col = a.indices[entry].long()
    found = _find(b, row, col, patterns_b)
    if not only_a:
        both = found >= 0
        row, col, entry, found = row[both], col[both], entry[both], found[both]
    kind_a, kind_b = a.tile[entry].long(), _kind(b, found)
    if only_b:
        row_b, entry_b = take_patterns(b, patterns_b)
        col_b = b.indices[entry_b].long()
        alone = _find(a, row_b, col_b, patterns_a) < 0
        row, col = torch.cat([row, row_b[alone]]), torch.cat([col, col_b[alone]])
        kind_a = torch.cat([kind_a, kind_a.new_full((int(alone.sum()),), len(a.bits) + 1)])
        kind_b = torch.cat([kind_b, b.tile[entry_b[alone]].long()])
    return row, col, kind_a, kind_b


def _kind(mask: BlockMask, entry: Tensor) -> Tensor:
    """The kind of each entry, dead for entry -1."""
    kind = torch.full_like(entry, len(mask.bits) + 1)
    stored = entry >= 0
    kind[stored] = mask.tile[entry[stored]].long()
    return kind


def _find(mask: BlockMask, row: Tensor, col: Tensor, patterns: Tensor) -> Tensor:
    """The entry of each tile `(row, col)`, -1 if it is not stored; `row` counts over `patterns`. Binary search within
    each row, so that nothing of the size of the mask is allocated.
    """
    row_blocks = mask.blocks[0]
    row = patterns[row // row_blocks] * row_blocks + row % row_blocks
    low, stop = mask.indptr[row].long(), mask.indptr[row + 1].long()
    if len(mask.indices) == 0 or len(row) == 0:
        return torch.full_like(row, -1)
    high, last = stop, len(mask.indices) - 1
    for _ in range(int((stop - low).max()).bit_length()):
        middle = (low + high) // 2
        before = (low < high) & (mask.indices[middle.clamp(max=last)] < col)
        low, high = torch.where(before, middle + 1, low), torch.where(before, high, middle)
    found = (low < stop) & (mask.indices[low.clamp(max=last)] == col)
    return torch.where(found, low, -1)
