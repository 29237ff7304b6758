"""The tiles of one image with live scores, on the CPU.

The worker that draws an image finds its tiles, so the host knows all array sizes without a synchronisation. The device
computes the scores inside; see packed_masks.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.pathx.masks.relations import OWN, Relation

NOWHERE = 1 << 14  # beyond the reach of every mask


class TokenBlocks(NamedTuple):
    y: NDArray[np.int64]
    x: NDArray[np.int64]
    is_pixel: NDArray[np.bool_]  # [n, block]
    is_register: NDArray[np.bool_]


def live_tiles(relation: Relation, blocks: TokenBlocks) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """bool [n, n] each: tiles that may have live scores, and tiles in which all are.

    `may` uses the bounding boxes of blocks, so a few of its tiles may be dead.
    """
    whole = (blocks.is_pixel | blocks.is_register).all(1)
    complete = whole[:, None] & whole
    some = blocks.is_pixel.any(1)
    inhabited = some[:, None] & some
    if relation.kind == "dense":
        may, full = inhabited, complete
    elif relation.kind == OWN:
        may, full = inhabited, np.zeros_like(inhabited)
    elif relation.kind in ("butterfly", "factor"):
        may, full = _cells(relation, blocks)
    else:
        may, full = _boxes(relation, blocks)
    may, full = may & inhabited, full & complete
    has_register = blocks.is_register.any(1)
    everyone = blocks.is_register.any(1) | some
    may |= (has_register[:, None] & everyone) | (everyone[:, None] & has_register)
    return may, full & may


def _boxes(relation: Relation, blocks: TokenBlocks) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    radius = relation.numbers[0]
    near, inside = [], []
    for along in (blocks.y, blocks.x):
        low = np.where(blocks.is_pixel, along, NOWHERE).min(1)
        high = np.where(blocks.is_pixel, along, -NOWHERE).max(1)
        least = np.maximum(low[:, None] - high, low - high[:, None])
        most = np.maximum(high[:, None] - low, high - low[:, None])
        near.append(least <= radius)
        inside.append(most <= radius)
    if relation.kind == "near":
        return near[0] & near[1], inside[0] & inside[1]
    if relation.kind == "tiles":
        may = near[0] & near[1]
        return may, may
    if relation.kind == "axial":
        return near[0] | near[1], inside[0] | inside[1]
    axis = 0 if relation.kind == "rows" else 1
    return near[axis], inside[axis]


def _cells(relation: Relation, blocks: TokenBlocks) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    may, full = True, True
    for along in (blocks.y, blocks.x):
        cell = along // relation.numbers[0]
        count = int(np.where(blocks.is_pixel, cell, 0).max()) + 1
        touched = np.zeros((len(cell), count), np.float32)
        block, token = np.nonzero(blocks.is_pixel)
        touched[block, cell[block, token]] = 1
        related = relation.related(np.arange(count)[:, None], np.arange(count))
        may = may & ((touched @ related.astype(np.float32) @ touched.T) > 0)
        full = full & ((touched @ (~related).astype(np.float32) @ touched.T) == 0)
    return may, full
