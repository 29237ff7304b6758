"""Masks most of whose tiles hold the same bits as others, and say so beforehand: bits are made once for those alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparseflash import tiles
from sparseflash.blockmask import BlockMask
from sparseflash.building import SCORES_AT_ONCE, arrays_of
from sparseflash.checks import Block, block_pair


def from_alike(
    q_len: int, k_len: int, rows: Tensor, cols: Tensor, codes: Sequence[Tensor], live: Callable[[Tensor], Tensor], *,
    block: Block,
) -> BlockMask:  # fmt: skip
    """The mask of the tiles `(rows, cols)`, int64 `[E]`, each listed once; two with equal codes hold the same bits.

    `codes`: int tensors `[E]`, none negative, all of which must be equal. `live(some)` gets the numbers of some tiles,
    int64 `[S]`, at most one of each kind, and returns bool `[S, block_q, block_k]`. Scores past the ends are dropped.
    """
    block_q, block_k = block_pair(block)
    alike, count_of_kinds = number(codes)
    representative = torch.zeros(count_of_kinds, dtype=torch.int64).scatter_(0, alike, torch.arange(len(rows)))
    words, kinds, count = [], [], 0
    for some in representative.split(max(1, SCORES_AT_ONCE // (block_q * block_k))):
        distinct, kind = tiles.deduplicate(tiles.pack(live(some)))
        words.append(distinct)
        kinds.append(kind + count)
        count += len(distinct)
    part = (rows, cols, torch.cat(kinds)[alike] + 1, torch.cat(words))
    return BlockMask(q_len, k_len, block_q, block_k, *arrays_of(q_len, k_len, block_q, block_k, [part], 1, 1))


def number(codes: Sequence[Tensor]) -> tuple[Tensor, int]:
    """A number for each combination of codes that occurs, 0, 1, ..., and how many there are."""
    numbers, count = torch.zeros_like(codes[0], dtype=torch.int64), 1
    for code in codes:
        values = int(code.max()) + 1
        code = numbers * values + code  # does not overflow: numbers stay below that of the tiles
        if count * values <= 4 * len(code):
            occurs = torch.zeros(count * values, dtype=torch.bool)
            occurs[code] = True
            numbers = (occurs.cumsum(0) - 1)[code]
        else:  # by sorting: on codes as regular as these torch.unique is ten times slower
            ordered, order = code.sort()
            ranks = torch.unique_consecutive(ordered, return_inverse=True)[1]
            numbers = torch.empty_like(order).scatter_(0, order, ranks)
        count = int(numbers.max()) + 1
    return numbers, count
