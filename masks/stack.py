"""Different masks for different heads or batch elements."""

from __future__ import annotations

from collections.abc import Sequence

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.ops.stack import stack_batch, stack_heads
from sparseflash.masks.tiling.signatures import pattern


@pattern
def per_head(masks: Sequence[BlockMask]) -> BlockMask:
    """One mask whose heads are those of the given ones, in that order.

        live(b, h, q, k) = live of masks[h] at (b, q, k)

    `masks`: at least one, with equal `q_len` and `k_len` and on one device. One with several heads gives them all, so
    masks of 2 and 3 heads make 5. Batch sizes broadcast. Different blocks are cut to the finest, in each of the two
    dimensions. Equal heads are stored once. Lengths stay if all masks have the same; any other padding is written into
    the tiles (`BlockMask.bake_lengths`).

    Raises ValueError for an empty list or masks that do not fit together, TypeError for what is no mask.

    Half of the heads look near, half of them far:

    >>> from sparseflash import masks
    >>> mask = masks.per_head([masks.local(4096, window=256)] * 4 + [masks.butterfly(4096)] * 4)
    >>> mask.shape
    (1, 8, 4096, 4096)
    >>> mask.pattern.tolist()  # two distinct ones are stored
    [[0, 0, 0, 0, 1, 1, 1, 1]]
    """
    return stack_heads(masks)


@pattern
def per_batch(masks: Sequence[BlockMask]) -> BlockMask:
    """One mask whose batch elements are those of the given ones, in that order.

        live(b, h, q, k) = live of masks[b] at (h, q, k)

    `masks`: as in `per_head`; here batch elements add up and heads broadcast. Lengths stay lengths: a mask without any
    among others that have them counts as one without padding.

    >>> from sparseflash import masks
    >>> masks.per_batch([masks.local(1024, window=64), masks.causal(1024)]).shape
    (2, 1, 1024, 1024)
    """
    return stack_batch(masks)
