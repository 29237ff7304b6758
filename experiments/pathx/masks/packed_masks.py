"""The masks of a packed batch, completed on the device.

They are dynamic: made at every step, so equal tiles are not deduplicated. The host does not wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.pathx.masks.relations import Relation
from sparseflash import BlockMask
from sparseflash.blockmask import bitmask

_SCORES_AT_ONCE = 1 << 26  # 64 MB


def packed_mask(
    relation: Relation,
    indptr: Tensor,
    indices: Tensor,
    tile: Tensor,
    partial: Tensor,
    places: tuple[Tensor, Tensor],
    is_pixel: Tensor,
    is_register: Tensor | None,
    block: int,
) -> BlockMask:
    """places: y and x, int16 [N], and is_pixel, is_register bool [N], in the relation's order. Padding is dead."""
    length = len(is_pixel)
    y, x, pixel = (each.view(-1, block) for each in (*places, is_pixel))
    register = None if is_register is None else is_register.view(-1, block)
    words = []
    for some in partial.long().split(max(1, _SCORES_AT_ONCE // block**2)):
        q, k = some.unbind(1)
        live = relation.live(y[q][:, :, None], x[q][:, :, None], y[k][:, None, :], x[k][:, None, :])
        live = live & pixel[q][:, :, None] & pixel[k][:, None, :]
        if register is not None:
            token = pixel | register
            live = live | (register[q][:, :, None] & token[k][:, None, :])
            live = live | (token[q][:, :, None] & register[k][:, None, :])
        words.append(bitmask.pack(live))
    bits = torch.cat(words) if words else indptr.new_zeros(0, block, bitmask.words_per_row(block))
    pattern = indptr.new_zeros(1, 1)
    return BlockMask(length, length, block, block, indptr, indices, tile, bits, pattern, dynamic=True)
