"""Masks with few kinds of tiles, which the pattern can name: bits are made once for each kind, not for each tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, block_pair, token_counts
from sparseflash.blockmask.build import SCORES_AT_ONCE
from sparseflash.blockmask.patterns import first_of_each
from sparseflash.blockmask.unique import number_combinations


def by_kind(
    live: Callable[[Tensor], Tensor], rows: Tensor, cols: Tensor, codes: Sequence[Tensor], q_len: int,
    k_len: int | None = None, *, block: Block = 128,
) -> BlockMask:  # fmt: skip
    """The mask of listed tiles; tiles with equal codes have the same bits.

    `rows`, `cols`: int `[E]`, the tiles, each once; they must cover every live score. `codes`: int tensors `[E]`, any
    number of them. `live(some)` takes the indices of some tiles, int64 `[S]`, one of each kind, and returns bool
    `[S, block_q, block_k]`, or their words; scores past the ends may be live, and are dropped afterwards.
    """
    block_q, block_k = block_pair(block)
    q_len, k_len = token_counts(q_len, q_len if k_len is None else k_len)
    kind, count_of_kinds = number_combinations(codes)
    # The first tile of each kind, so that every machine evaluates the same one.
    first = torch.from_numpy(first_of_each(kind.numpy(), count_of_kinds))
    words = [torch.zeros(0, block_q, bitmask.words_per_row(block_k), dtype=torch.int32, device="cpu")]
    found, count = [torch.zeros(0, dtype=torch.int64, device="cpu")], 0
    portions = first.split(max(1, SCORES_AT_ONCE // (block_q * block_k))) if len(first) else ()
    for some in portions:
        made = live(some)
        distinct, number = bitmask.deduplicate(bitmask.pack(made) if made.dtype == torch.bool else made)
        words.append(distinct)
        found.append(number + count)
        count += len(distinct)
    part = (rows, cols, torch.cat(found).to(torch.int32).add_(1).index_select(0, kind), torch.cat(words))
    return BlockMask._of(q_len, k_len, block_q, block_k, [part])
