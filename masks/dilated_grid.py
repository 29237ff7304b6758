"""Dilated attention over a grid: every token sees every k-th token of each axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, Integers, block_pair
from sparseflash.blockmask.build import SCORES_AT_ONCE, arrays_of_rows
from sparseflash.blockmask.patterns import starts_of
from sparseflash.blockmask.unique import distinct
from sparseflash.masks.tiling.grid import checked_order, coordinates, cut, grid_shape, per_axis, strides
from sparseflash.masks.tiling.listing import entries, incidence, ranges
from sparseflash.masks.tiling.signatures import pattern


@pattern
def dilated_grid(
    shape: Sequence[int], *, dilation: int | Sequence[int], order: Integers | None = None, block: Block = 128
) -> BlockMask:
    """Every token of a grid sees every `dilation`-th token on each axis, counted from its own place in both directions.

    >>> from sparseflash.masks import order
    >>> dilated_grid((64, 64), dilation=4)
    BlockMask(4096 x 4096, blocks of 128, 512 tiles: 0 full + 512 partial (1 distinct), density 6.25 %)

    Score (q, k) is live iff on every axis, with the coordinates q and k there,

        (q - k) % dilation == 0

    at any distance, so 1 / dilation^axes of all scores. For a dilated window use `neighborhood(..., dilation=)`.

    Source: xformers' `dilated_2d_pattern`. In row-major order nearly all live tiles are partial; with
    `order=order.residues(shape, dilation)` tokens that see one another are neighbours, and the mask is block-diagonal.

        2 x 4, dilation 2
        X . X . . . . .
        . X . X . . . .
        X . X . . . . .
        . X . X . . . .
        . . . . X . X .
        . . . . . X . X
        . . . . X . X .
        . . . . . X . X

    Args:
        shape: side lengths in tokens, as (height, width) or (frames, height, width).
        dilation: tokens, one value or one for each axis.
        order: token t of the mask is token `order[t]` of the grid in row-major order.
        block: tokens per side of a tile.

    >>> dilated_grid((64, 64), dilation=4, order=order.residues((64, 64), 4))
    BlockMask(4096 x 4096, blocks of 128, 64 tiles: 64 full + 0 partial, density 6.25 %)
    """
    block_q, block_k = block_pair(block)
    sides = grid_shape(shape)
    steps = per_axis(dilation, sides, "dilation", "tokens")
    steps = tuple(min(step, side) for step, side in zip(steps, sides))
    count, groups = math.prod(sides), math.prod(steps)
    places = coordinates(sides, checked_order(order, count)).long()
    group = (places % places.new_tensor(steps) * places.new_tensor(strides(steps))).sum(1).to(torch.int32)
    queries, query = bitmask.deduplicate(cut(group, block_q)[:, :, None])
    keys, key = bitmask.deduplicate(cut(group, block_k)[:, :, None])
    # Blocks with the same sequence of groups are alike, and see one another if they share a group. Block rows with
    # equal sequences have the same tiles.
    meet = incidence(queries[:, :, 0], groups) @ incidence(keys[:, :, 0], groups).T
    alike, cols = entries(meet @ incidence(key[:, None], len(keys)).T)
    pairs, number = distinct(alike * len(keys) + key[cols])
    columns, kinds = cols.to(torch.int32).numpy(), (number + 1).to(torch.int32).numpy()
    first, stop = (alike.numpy().searchsorted(query.numpy(), side=side) for side in ("left", "right"))
    indptr = starts_of(stop - first)
    listed, kind = (np.empty(indptr[-1], dtype=np.int32) for _ in range(2))
    for _, portion, at in ranges(first, stop - 1):
        listed[portion], kind[portion] = columns[at], kinds[at]

    def words_of(some: NDArray[np.int64]) -> Tensor:
        portions = pairs[torch.from_numpy(some)].split(max(1, SCORES_AT_ONCE // (block_q * block_k)))
        made = (queries[each // len(keys)] == keys[each % len(keys)].transpose(1, 2) for each in portions)
        return torch.cat([bitmask.pack(live) for live in made])

    arrays = arrays_of_rows(count, count, block_q, block_k, indptr, listed, kind, len(pairs), words_of)
    return BlockMask(count, count, block_q, block_k, *arrays)
