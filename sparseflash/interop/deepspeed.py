"""DeepSpeed's sparse attention layouts: int64 `[H, nb, nb]`, 1 for a live block, and the block size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import checked_mask, integer, plain_tensor
from sparseflash.interop.heads import pattern_of_mask, whole_blocks


class DeepSpeedLayout(NamedTuple):
    """The result of `SparsityConfig.make_layout`, and the `block` of the configuration.

    >>> to_deepspeed(BlockMask.dense(32, block=16)).block
    16
    """

    layout: Tensor  # int64 [H, nb, nb]
    block: int  # tokens


def to_deepspeed(mask: BlockMask, *, heads: int | None = None, cover: bool = False) -> DeepSpeedLayout:
    """The layout of DeepSpeed's `SparsityConfig` for a mask of square, whole blocks.

    >>> to_deepspeed(BlockMask.from_layout(torch.eye(3, dtype=torch.bool), block=16))
    DeepSpeedLayout(layout=tensor([[[1, 0, 0],
             [0, 1, 0],
             [0, 0, 1]]]), block=16)

    Args:
        heads: the number of heads, for a mask that all of them share (1 by default).
        cover: make partial tiles fully live.

    With `cover=True` the result is a different mask, so pass the exact mask to DeepSpeed as `attn_mask` `[N, N]`, one
    for all heads (`to_sdpa(mask)[0, 0]`, `attn_mask_mode="mul"`). Causal masks need this, too: DeepSpeed's
    "unidirectional" layouts are causal between blocks only.

    Raises ValueError for blocks that are not square or not whole, different numbers of queries and keys, a mask that
    differs within the batch, and, without `cover`, for a partial tile, naming the first.
    """
    mask = checked_mask(mask)
    if mask.block_q != mask.block_k or mask.q_len != mask.k_len:
        raise ValueError(
            "a DeepSpeed layout must be square, in tokens and in blocks; got "
            f"{mask.q_len} x {mask.k_len} tokens in blocks of {mask.block_q} x {mask.block_k}."
        )
    mask = mask.bake_lengths()
    whole_blocks(mask, "a DeepSpeed layout", "Pad the sequence, as its pad_to_block_size does.")
    pattern = mask.pattern
    if not bool((pattern == pattern[:1]).all()):
        raise ValueError(
            f"a DeepSpeed layout must serve the whole batch; got a mask whose {len(pattern)} batch elements differ."
        )
    if heads is not None and (integer(heads, "heads", "") < 1 or pattern.shape[1] not in (1, heads)):
        own = "at least 1" if pattern.shape[1] == 1 else f"{pattern.shape[1]}, as in the mask"
        raise ValueError(f"heads must be {own}; got {heads}.")
    blocks = mask.blocks[0]
    patterns = (len(mask.indptr) - 1) // blocks
    layout = torch.zeros(patterns, blocks, blocks, dtype=torch.int64, device=mask.device)
    for p in range(patterns):
        rows, cols, tile, _ = pattern_of_mask(mask, p)
        partial = (tile > 0).nonzero()[:, 0]
        if len(partial) and not cover:
            q, k = int(rows[partial[0]]) * mask.block_q, int(cols[partial[0]]) * mask.block_k
            raise ValueError(
                f"a DeepSpeed layout must consist of full tiles; got {len(partial)} partial ones, the first with "
                f"queries {q}..{q + mask.block_q - 1} and keys {k}..{k + mask.block_k - 1}. cover=True makes them "
                "fully live; DeepSpeed's attn_mask must then say which of their scores are live."
            )
        layout[p, rows, cols] = 1
    return DeepSpeedLayout(layout[pattern[0].long()].expand(heads or -1, -1, -1).contiguous(), mask.block_q)


def from_deepspeed(layout: Tensor, block: int) -> BlockMask:
    """The mask of a DeepSpeed layout: `nb * block` queries and keys, with every listed block fully live.

    >>> from_deepspeed(torch.ones(2, 4, 4, dtype=torch.int64).tril(), 16)
    BlockMask(64 x 64, blocks of 16, 10 tiles: 10 full + 0 partial, density 62.5 %, \
    1 pattern for 1 x 2 (batch x heads))

    Args:
        layout: integer or bool `[H, nb, nb]` of zeros and ones, from `SparsityConfig.make_layout(seq_len)`.
        block: tokens, the configuration's `block`.

    In a "unidirectional" layout the blocks on the diagonal see the future: intersect the mask with `masks.causal`.

    Raises ValueError for another shape or other values.
    """
    plain_tensor(layout, "layout")
    if layout.ndim != 3 or layout.shape[1] != layout.shape[2]:
        raise ValueError(f"layout must have shape [H, nb, nb]; got {list(layout.shape)}.")
    if len(others := layout[(layout != 0) & (layout != 1)]):
        raise ValueError(f"layout must hold 0 and 1 only; got values {others[:8].tolist()}.")
    return BlockMask.from_layout(layout == 1, block=integer(block, "block", "tokens"))
