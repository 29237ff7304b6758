from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from experiments.pathx.masks.live_tiles import TokenBlocks, live_tiles
from experiments.pathx.masks.orders import pixels_in
from experiments.pathx.masks.relations import Relation
from sparseflash import BlockMask, masks
from sparseflash.blockmask import bitmask


@lru_cache(maxsize=32)
def grid_mask(relation: Relation, side: int, block: int, registers: int = 0) -> BlockMask:
    if side * side % block:
        raise ValueError(f"an image must have a multiple of {block} pixels; got {side} x {side}")
    mask = _of_pixels(relation, side, block)
    return with_registers(mask, registers) if registers else mask


def _of_pixels(relation: Relation, side: int, block: int) -> BlockMask:
    shape, order = (side, side), torch.from_numpy(pixels_in(relation.order, side))
    radius = relation.numbers[0] if relation.numbers else 0
    everywhere = 2 * side - 1
    if relation.kind == "dense":
        return BlockMask.dense(side * side, block=block)
    if relation.kind == "near":
        return masks.neighborhood(shape, window=2 * radius + 1, edges="crop", order=order, block=block)
    if relation.kind == "rows":
        return masks.neighborhood(shape, window=(2 * radius + 1, everywhere), edges="crop", order=order, block=block)
    if relation.kind == "columns":
        return masks.neighborhood(shape, window=(everywhere, 2 * radius + 1), edges="crop", order=order, block=block)
    if relation.kind == "axial" and radius == 0:
        return masks.axial(shape, order=order, block=block)
    if relation.kind == "butterfly":
        return masks.butterfly_2d(side, side, cell=radius, block=block).permute(order)
    pixels = pixels_in(relation.order, side)
    y, x = (part.reshape(-1, block) for part in (pixels // side, pixels % side))
    nothing = np.zeros(y.shape, np.bool_)
    may, _ = live_tiles(relation, TokenBlocks(y, x, ~nothing, nothing))
    candidates = tuple(map(torch.from_numpy, np.nonzero(may)))
    at_y, at_x = torch.from_numpy(pixels // side), torch.from_numpy(pixels % side)
    return BlockMask.from_function(
        lambda q, k: relation.live(at_y[q], at_x[q], at_y[k], at_x[k]), side * side, block=block, candidates=candidates
    )


def with_registers(mask: BlockMask, registers: int) -> BlockMask:
    """One more block in front; its first `registers` tokens see and are seen by all."""
    block, (rows, _) = mask.block_q, mask.blocks
    if not 0 < registers <= block:
        raise ValueError(f"registers must be from 1 to the block of {block}; got {registers}")
    row = torch.repeat_interleave(torch.arange(rows), mask.indptr.diff().long()) + 1
    first = torch.zeros(block, block, dtype=torch.bool)
    first[:registers] = True
    known = len(mask.bits)
    others, zero = torch.arange(1, rows + 1), torch.zeros(rows, dtype=torch.int64)
    corner = torch.zeros(1, dtype=torch.int64)
    live = torch.cat([bitmask.unpack(mask.bits, block), torch.stack([first, first.T, first & first.T])])
    return BlockMask.from_tiles(
        torch.cat([corner, zero, others, row]),
        torch.cat([corner, others, zero, mask.indices.long() + 1]),
        mask.q_len + block,
        block=block,
        tile=torch.cat([corner + known + 3, zero + known + 1, zero + known + 2, mask.tile.long()]),
        live=live,
    )
