"""Masks whose heads differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.building import arrays_of
from sparseflash.csr import row_of_entry


def cycle(masks: Sequence[BlockMask], heads: int) -> BlockMask:
    """Head h has the pattern of `masks[h % len(masks)]`, which are single patterns of one size and block."""
    masks = masks[:heads]
    parts = [(row_of_entry(m.indptr, len(m.indices)), m.indices.long(), m.tile.long(), m.bits) for m in masks]
    size = (masks[0].q_len, masks[0].k_len, masks[0].block_q, masks[0].block_k)
    indptr, indices, tile, bits, pattern = arrays_of(*size, parts, 1, len(masks))
    of_head = pattern[:, torch.arange(heads) % len(masks)]
    return BlockMask(*size, indptr, indices, tile, bits, of_head.contiguous())
