"""One mask of several, each at its own place in a longer sequence of queries and keys; elsewhere nothing is live."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.ops.padding import bake_lengths
from sparseflash.blockmask.ops.reblock import to_one_block
from sparseflash.blockmask.ops.tilelist import TileList, mask_of, take_patterns
from sparseflash.blockmask.stats import pattern_count
from sparseflash.blockmask.unique import distinct

Placed = tuple[BlockMask, int, int]  # a mask, the token of its first query and that of its first key


def place(parts: Sequence[Placed], q_len: int, k_len: int) -> BlockMask:
    """The mask of `q_len x k_len` scores in which each part is live at its place.

    >>> from sparseflash import masks
    >>> causal = masks.causal(3, block=16)
    >>> place([(causal, 0, 0), (causal, 3, 3)], 6, 6) == masks.documents([3, 3], causal=True, block=16)
    True

    The parts must be at least one, lie inside, share no score, have no more than one batch element, and the same number
    of heads or one. Places need not be multiples of the block: bits are shifted once for each distinct mask and place
    within a block. Time and memory are proportional to the tiles of all parts.
    """
    once = {id(mask): mask for mask, _, _ in parts}
    canonical = [bake_lengths(mask.canonical()) for mask in once.values()]
    once = dict(zip(once, to_one_block(canonical), strict=True))
    first = next(iter(once.values()))
    block_q, block_k = first.block_q, first.block_k
    heads = max(mask.shape[1] for mask in once.values())
    for mask in once.values():
        if mask.shape[0] != 1 or mask.shape[1] not in (1, heads):
            raise ValueError(
                f"the masks of sequences must be of one batch element and of 1 or {heads} heads; got one of "
                f"{mask.shape[0]} batch elements and {mask.shape[1]} heads."
            )
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    shifted: dict[tuple[int, int, int], tuple[int, Tensor, Tensor, Tensor]] = {}
    rows, cols, kinds, words = [], [], [], []
    known = 0
    for mask, q_start, k_start in parts:
        key = id(mask), q_start % block_q, k_start % block_k
        if key not in shifted:
            made = _moved(once[key[0]], key[1], key[2])
            row, entry = take_patterns(made, made.pattern.long().expand(1, heads).reshape(-1))
            own = made.blocks[0]
            row = row // own * row_blocks + row % own
            kind = made.tile[entry].long()
            shifted[key] = known, row, made.indices[entry].long(), kind.add(known).masked_fill_(kind == 0, 0)
            words.append(made.bits)
            known += len(made.bits)
        _, row, col, kind = shifted[key]
        rows.append(row + q_start // block_q)
        cols.append(col + k_start // block_k)
        kinds.append(kind)
    listed = TileList(
        q_len, k_len, block_q, block_k, torch.cat(rows), torch.cat(cols), torch.cat(kinds), torch.cat(words),
        torch.arange(heads, device=first.device).view(1, heads), heads,
    )  # fmt: skip
    return mask_of(_merged(listed, col_blocks))


def _moved(mask: BlockMask, down: int, right: int) -> BlockMask:
    """The mask behind `down` queries and `right` keys without a live score, fewer than those of a block each."""
    if down == right == 0:
        return mask
    # A whole block of dead tokens is put before it, and what is too many is cut off.
    counts = mask.indptr.diff().view(pattern_count(mask), -1)
    indptr = torch.nn.functional.pad(torch.nn.functional.pad(counts, (1, 0)).view(-1).cumsum(0), (1, 0))
    longer = BlockMask(
        mask.q_len + mask.block_q, mask.k_len + mask.block_k, mask.block_q, mask.block_k, indptr.to(torch.int32),
        mask.indices + 1, mask.tile, mask.bits, mask.pattern,
    )  # fmt: skip
    return longer.crop(q=(mask.block_q - down, None), k=(mask.block_k - right, None))


def _merged(listed: TileList, col_blocks: int) -> TileList:
    """The list with the tiles that parts share made one. None of these is full, because parts share no score."""
    key, group = distinct(listed.row * col_blocks + listed.col)
    if len(key) == len(group):
        return listed
    shared = torch.bincount(group, minlength=len(key)) > 1
    number = shared.cumsum(0) - 1
    own, several = ~shared[group], shared[group]
    words = listed.words.new_zeros(int(shared.sum()), *listed.words.shape[1:])
    entries = several.nonzero().squeeze(1)
    for some in entries.split(max(1, bitmask.WORDS_AT_ONCE // words[0].numel())):
        # The bits are distinct, so adding them never carries and the sum is their union.
        words.index_add_(0, number[group[some]], listed.words[listed.kind[some] - 1])
    kinds = torch.arange(1, len(words) + 1, device=key.device) + len(listed.words)
    return TileList(
        listed.q_len, listed.k_len, listed.block_q, listed.block_k,
        torch.cat([listed.row[own], key[shared] // col_blocks]), torch.cat([listed.col[own], key[shared] % col_blocks]),
        torch.cat([listed.kind[own], kinds]), torch.cat([listed.words, words]), listed.pattern, listed.patterns,
    )  # fmt: skip
