"""The number of live tiles of a mask with its tokens in another order."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import checked_integers, tensor_of
from sparseflash.blockmask.build import SCORES_AT_ONCE
from sparseflash.blockmask.walks import walks, words_of

_MOST_TILES = 1 << 28  # one byte per tile


def live_tiles_in_order(mask: BlockMask, order: Tensor) -> int:
    """Live tiles, over all heads and batch elements of `mask.shape`, if new token t is old token `order[t]`.

    Time is proportional to the scores of the live tiles; memory is a byte for every tile. Raises TypeError or
    ValueError if `order` is no permutation of the tokens, or for over 2^28 tiles.
    """
    place = _places(mask, order)
    row_blocks, col_blocks = mask.blocks
    if row_blocks * col_blocks > _MOST_TILES:
        raise ValueError(
            f"masks must have at most {_MOST_TILES} tiles, live or not, to compare orders; got {row_blocks} x "
            f"{col_blocks}. Pass a mask with larger blocks."
        )
    total = 0
    for walk in walks(mask):
        live = torch.zeros(row_blocks * col_blocks, dtype=torch.bool, device="cpu")
        each = torch.arange(len(walk.rows), device="cpu").split(max(1, SCORES_AT_ONCE // (mask.block_q * mask.block_k)))
        for some in each:
            patch = bitmask.unpack(words_of(walk.kind[some], walk.bits, mask.block_k), mask.block_k)
            tile, a, b = patch.nonzero(as_tuple=True)
            row = place[walk.rows[some][tile] * mask.block_q + a] // mask.block_q
            live[row * col_blocks + place[walk.cols[some][tile] * mask.block_k + b] // mask.block_k] = True
        total += len(walk.users) * int(live.sum())
    return total


def _places(mask: BlockMask, order: Tensor) -> Tensor:
    try:
        order = tensor_of(order).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"an order must be an integer tensor; got {order!r}.") from error
    checked_integers(order, "an order")
    if mask.q_len != mask.k_len:
        raise ValueError(f"masks must have as many queries as keys to be reordered; got {mask.q_len} x {mask.k_len}.")
    order = order.long()
    tokens = torch.arange(mask.q_len, device="cpu")
    if order.shape != (mask.q_len,) or not torch.equal(order.sort().values, tokens):
        raise ValueError(
            f"an order must list each of the {mask.q_len} tokens once; got a tensor of shape {list(order.shape)}"
            f"{' that does not' if order.shape == (mask.q_len,) else ''}."
        )
    place = torch.empty_like(order)
    place[order] = tokens
    return place
