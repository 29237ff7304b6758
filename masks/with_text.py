"""Tokens of text beside an image or a video, which see everything and are seen by everything."""

from __future__ import annotations

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import checked_mask, flag
from sparseflash.blockmask.ops.place import place
from sparseflash.masks.dense import dense
from sparseflash.masks.tiling.arguments import at_least
from sparseflash.masks.tiling.signatures import pattern


@pattern
def with_text(mask: BlockMask, *, text: int, after: bool = False) -> BlockMask:
    """The mask of a grid's tokens with `text` tokens of text before them.

    >>> from sparseflash import masks
    >>> video = masks.neighborhood((16, 32, 32), window=(4, 8, 8), order=masks.order.tiles((16, 32, 32), (2, 8, 8)))
    >>> with_text(video, text=256).shape
    (1, 1, 16640, 16640)

    With t = `text` and N = `mask.q_len`:

        live(h, q, k) = q < t  or  k < t  or  live of mask at (h, q - t, k - t)

    Args:
        mask: of as many queries as keys and one batch element, with any number of heads.
        text: tokens. A multiple of the block adds no partial tiles.
        after: the text comes after the grid, from token N on.

    For texts of other lengths in each batch element, pack the sequences: `varlen.varlen_mask`.

    Source: joint attention to text and video, as in HunyuanVideo (2024, text last) and CogVideoX (2024, text first).

    Raises ValueError for a mask of other sizes.

        text of 1 block, a window in 4
        X X X X X
        X X X . .
        X X X X .
        X . X X X
        X . . X X
    """
    mask = checked_mask(mask)
    text, after = at_least(0, text, "text", "tokens"), flag(after, "after")
    if mask.q_len != mask.k_len or mask.shape[0] != 1:
        raise ValueError(
            f"mask must be of one batch element, and of as many queries as keys; got {mask.shape[0]} batch elements, "
            f"{mask.q_len} queries and {mask.k_len} keys."
        )
    if text == 0:
        return mask
    size, block = mask.q_len, (mask.block_q, mask.block_k)
    at, own = (size, 0) if after else (0, text)
    rows = dense(text, text + size, block=block)
    return place([(rows, at, 0), (dense(size, text, block=block), own, at), (mask, own, own)], text + size, text + size)
