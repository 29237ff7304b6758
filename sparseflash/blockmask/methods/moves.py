"""Methods of `BlockMask` that move its scores: other tiles, parts, other orders, queries and keys exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparseflash.blockmask.arguments import Block
from sparseflash.blockmask.methods import mask_method

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask


@mask_method
def reblock(mask: BlockMask, block: Block) -> BlockMask:
    """The same live scores in tiles of another size, finer or coarser in each dimension.

    >>> from sparseflash import masks
    >>> masks.local(1024, window=64, block=64).reblock(128)
    BlockMask(1024 x 1024, blocks of 128, 22 tiles: 0 full + 22 partial (3 distinct), density 6.25 %)
    >>> masks.local(1024, window=64, block=64).reblock(128) == masks.local(1024, window=64, block=128)
    True

    Args:
        block: tokens per tile, a power of two from 16 to 256, or `(block_q, block_k)`.

    Finer tiles let kernels skip more, coarser tiles are fewer; lengths are unchanged. Returns the mask itself if
    the size is the same. Time and memory are proportional to the tiles before and after.
    """
    from sparseflash.blockmask.ops import reblock

    return reblock.reblock(mask.canonical(), block)


@mask_method
def crop(mask: BlockMask, *, q: Sequence[int | None] | None = None, k: Sequence[int | None] | None = None) -> BlockMask:
    """The mask of a range of the queries and a range of the keys: `to_dense()[:, :, q0:q1, k0:k1]`.

    >>> from sparseflash import masks
    >>> masks.causal(1000, block=64).crop(q=(900, 1000)) == masks.causal(100, 1000, block=64)
    True
    >>> masks.local(1000, window=5, block=32).crop(q=(7, 300), k=(7, 300)) == masks.local(293, window=5, block=32)
    True

    Args:
        q, k: `(start, stop)` in tokens with `0 <= start < stop <= length`; None for a bound or a range: all of it.
            Negative numbers are refused; they do not count from the end.

    If the start is a multiple of the block only tiles move; otherwise bits are shifted, once per distinct pair of
    neighbours. Lengths are reduced by the starts. Time and memory are proportional to the tiles of the selected
    queries.

    Raises ValueError for an empty range or one that exceeds the mask, TypeError for anything but a pair of
    integers.
    """
    from sparseflash.blockmask.ops import crop

    return crop.crop(mask.canonical(), q, k)


@mask_method
def select(mask: BlockMask, *, batch: Any = None, heads: Any = None) -> BlockMask:
    """The mask of some batch elements and some heads: `to_dense()[batch][:, heads]`.

    >>> from sparseflash import masks
    >>> local, causal = masks.local(256, window=64, block=64), masks.causal(256, block=64)
    >>> mask = masks.per_head([local, local, causal, causal])
    >>> mask.select(heads=slice(2, 4)) == masks.per_head([causal, causal])
    True
    >>> mask.with_lengths([256, 100, 7]).select(batch=[1, 2]) == mask.with_lengths([100, 7])
    True

    Args:
        batch, heads: an index, a slice, or several indices (a list, tensor or array) in any order; None: all.
            Negative indices are refused.

    Use it for a rank of a tensor-parallel model, a micro-batch, or the smaller last batch. A mask that is shared by
    all heads, or by all batch elements, stays shared. Lengths follow the batch elements. Time is proportional to
    the tiles of the selection.

    Raises ValueError for an empty selection or an index out of range, TypeError for an index that is not an
    integer.
    """
    from sparseflash.blockmask.ops import select

    return select.select(mask.canonical(), batch, heads)


@mask_method
def permute(mask: BlockMask, order: Any = None, *, q: Any = None, k: Any = None) -> BlockMask:
    """The mask for tokens in another order: new token t is old token `order[t]`, on both sides.

    >>> mask = BlockMask.from_function(lambda q, k: q % 4 == k % 4, 1024, block=64)  # a stride: no tile is full
    >>> order = torch.arange(1024).reshape(256, 4).T.flatten()  # groups the tokens by their remainder mod 4
    >>> mask
    BlockMask(1024 x 1024, blocks of 64, 256 tiles: 0 full + 256 partial (1 distinct), density 25 %)
    >>> mask.permute(order)
    BlockMask(1024 x 1024, blocks of 64, 64 tiles: 64 full + 0 partial, density 25 %)
    >>> mask.permute(order).permute(order.argsort()) == mask
    True

    Args:
        order: a permutation of the tokens, an integer tensor, array or list `[N]`.
        q, k: permutations of each side, `[q_len]` and `[k_len]`, or of one side alone: `to_dense()[:, :, q][...,
            k]`.

    If q, k and v are reordered in the same way, as in `q[:, :, order]`, attention with `mask.permute(order)` gives
    the old result in the new order.

    An order that moves whole blocks only moves tiles. Any other rebuilds the bits of each tile, in time
    proportional to the queries and keys of the live tiles, and may scatter the live scores over many more tiles.
    Lengths are first written into the tiles (`bake_lengths`), because the padding is no longer at the end.

    Raises ValueError if `order` is not a permutation of the tokens, TypeError if it is not of integers.
    """
    from sparseflash.blockmask.ops import permute

    return permute.permute(mask.canonical(), order, q, k)


@mask_method
def transpose(mask: BlockMask) -> BlockMask:
    """The mask with queries and keys exchanged: `to_dense().transpose(-1, -2)`. Twice is the identity.

    >>> mask = BlockMask.from_function(lambda q, k: k <= q, 100, 60, block=(32, 16))
    >>> mask.transpose()
    BlockMask(60 x 100, blocks of 16 x 32, 14 tiles: 5 full + 9 partial (6 distinct), density 70.5 %)
    >>> mask.transpose().transpose() == mask
    True

    Block sizes and lengths are exchanged too. `columns` lists the same tiles without transposing their bits.
    """
    from sparseflash.blockmask.ops import transpose

    return transpose.transpose(mask.canonical())
