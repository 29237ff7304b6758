"""A mask as lookup arrays, for a `mask_mod` on the GPU: three reads say whether a score is live."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import checked_mask
from sparseflash.blockmask.csr import row_of_entry

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
READS = "_sparseflash_reads"  # attribute of our mask_mods: whether they depend on the batch element, and on the head


class TileLookup(NamedTuple):
    """A mask as arrays to index.

    >>> lookup = tile_lookup(BlockMask.from_function(lambda q, k: k <= q, 32, block=16))
    >>> lookup.table.tolist()  # 0: dead, 1: full, 2: the first partial tile
    [[[2, 0], [1, 2]]]

    Score (q, k) of head h of batch element b is live iff, with `t = table[pattern[b, h], q // block_q, k // block_k]`,
    bit `k % 32` of `words[t, q % block_q, k % block_k // 32]` is set (bit `k % 16` for blocks of 16 keys). `pattern` is
    indexed with 0 in dimensions of size 1.
    """

    pattern: Tensor  # int32 [B or 1, Hq or 1]
    table: Tensor  # int32 [P, Mq, Mk]: 0 a dead tile, 1 a full one, t + 1 the partial tile t
    words: Tensor  # int32 [T + 2, block_q, max(block_k // 32, 1)]


def tile_lookup(mask: BlockMask) -> TileLookup:
    """The lookup arrays of a mask: 4 bytes per tile, live or not, and the bits of the distinct tiles."""
    mask = checked_mask(mask).bake_lengths()
    (row_blocks, col_blocks), nnz = mask.blocks, len(mask.indices)
    rows = row_of_entry(mask.indptr, nnz)
    table = mask.tile.new_zeros(len(mask.indptr) - 1, col_blocks)
    table[rows, mask.indices.long()] = mask.tile + 1
    uniform = torch.stack([torch.zeros_like(mask.words[:1]), torch.full_like(mask.words[:1], _full(mask))])
    uniform = uniform.view(2, 1, 1).expand(2, *mask.bits.shape[1:])
    return TileLookup(mask.pattern, table.view(-1, row_blocks, col_blocks), torch.cat([uniform, mask.bits]))


def _full(mask: BlockMask) -> int:
    return bitmask.full_word(mask.block_k)


def mask_mod(lookup: TileLookup, block_q: int, block_k: int) -> MaskMod:
    """FlexAttention's `mask_mod(b, h, q_idx, kv_idx)` of these arrays, for single numbers or broadcastable tensors."""
    pattern, table, words = lookup
    batch_stride = pattern.shape[1] if pattern.shape[0] > 1 else 0
    head_stride = 1 if pattern.shape[1] > 1 else 0
    pattern = pattern.reshape(-1)
    bits = min(block_k, bitmask.WORD)

    def live(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        p = pattern[b * batch_stride + h * head_stride]
        t = table[p, q_idx // block_q, kv_idx // block_k]
        word = words[t, q_idx % block_q, kv_idx % block_k // bits]
        return ((word >> (kv_idx % bits)) & 1) == 1

    setattr(live, READS, (batch_stride > 0, head_stride > 0))
    return live
