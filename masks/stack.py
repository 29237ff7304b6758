"""Different masks for different heads or batch elements."""

from __future__ import annotations

from collections.abc import Sequence

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.ops.stack import stack_batch, stack_heads
from sparseflash.blockmask.recorded import stack_of
from sparseflash.masks.tiling.signatures import pattern


@pattern
def per_head(masks: Sequence[BlockMask]) -> BlockMask:
    """One mask with the heads of the given masks, in that order.

    >>> from sparseflash import masks
    >>> mask = masks.per_head([masks.local(4096, window=256)] * 4 + [masks.butterfly(4096)] * 4)
    >>> mask.shape
    (1, 8, 4096, 4096)

        live(b, h, q, k) = live of masks[h] at (b, q, k)

    Args:
        masks: at least one, with equal `q_len` and `k_len` and on one device.

    A mask with several heads contributes all of them, so masks of 2 and 3 heads make 5. Batch sizes broadcast. If block
    sizes differ, the smallest is used, separately for queries and keys. Equal heads are stored once. Lengths stay
    lengths if all masks have the same; any other padding is written into the tiles (`BlockMask.bake_lengths`).

    Raises ValueError for an empty list or masks that do not fit together, TypeError for anything that is not a mask.

    Of the eight heads above, four share one pattern and four another:

    >>> mask.pattern.tolist()  # two distinct patterns are stored
    [[0, 0, 0, 0, 1, 1, 1, 1]]
    """
    return stack_of(masks, stack_heads)


@pattern
def per_batch(masks: Sequence[BlockMask]) -> BlockMask:
    """One mask with the batch elements of the given masks, in that order.

    >>> from sparseflash import masks
    >>> masks.per_batch([masks.local(1024, window=64), masks.causal(1024)]).shape
    (2, 1, 1024, 1024)

        live(b, h, q, k) = live of masks[b] at (h, q, k)

    `masks`: as in `per_head`, except that batch elements add up and heads broadcast. Lengths stay lengths; a mask
    without lengths counts as one without padding.
    """
    return stack_batch(masks)
