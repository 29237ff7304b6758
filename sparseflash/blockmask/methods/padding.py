"""Methods of `BlockMask` for padded sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflash.blockmask.lengths import Lengths, lengths_of
from sparseflash.blockmask.methods import mask_method, method

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask


@method
def with_lengths(
    mask: BlockMask,
    lengths: Lengths | None = None,
    *,
    q_lengths: Lengths | None = None,
    k_lengths: Lengths | None = None,
) -> BlockMask:
    """The same mask with padding: queries and keys at or past a sequence's length are dead.

    >>> mask = BlockMask.dense(64, block=32).with_lengths([40, 64])
    >>> mask.to_dense().sum((-2, -1)).tolist()
    [[1600], [4096]]

    Cross-attention: each of three queries sees four of five keys in one sequence and two in the other.

    >>> mask = BlockMask.dense(3, 5, block=16).with_lengths(k_lengths=[4, 2])
    >>> mask.to_dense()[:, 0].sum(-1).tolist()
    [[4, 4, 4], [2, 2, 2]]

    Args:
        lengths: the tokens of each sequence, integers `[B]` on the mask's device, for queries and keys, each
            counted from its own start. Values are clamped to `0 .. q_len` and `0 .. k_len`.
        q_lengths, k_lengths: the lengths of queries and of keys separately; without one of them, all queries, or
            all keys, of the mask stay.

    Lengths that the mask had before are replaced. One length (`[1]`) applies to all sequences of any batch.

    The call does not synchronise with the device, and the new mask shares the arrays and the caches, so it is cheap
    enough for every training step; kernels skip the blocks past the end. A list of ints is accepted too, but the
    host waits for its copy to the device.

    Lengths do not move the diagonal: a causal mask stays aligned at the bottom right of `q_len x k_len`. For four
    new tokens at the ends of caches with 10 and 6 tokens, in a buffer of ten, build one mask per sequence:

    >>> from sparseflash import masks
    >>> mask = masks.per_batch([masks.causal(4, 10, offset=length - 4) for length in (10, 6)])
    >>> mask.to_dense()[:, 0].sum(-1).tolist()
    [[7, 8, 9, 10], [3, 4, 5, 6]]

    Raises TypeError for lengths that are not integers or for `lengths` together with one of the others, ValueError
    for a wrong shape, device or batch size.
    """
    return mask._padded(lengths_of(mask, lengths, q_lengths, k_lengths))


@mask_method
def bake_lengths(mask: BlockMask) -> BlockMask:
    """The same mask with its padding written into the tiles and no `lengths`; itself if it has none.

    >>> padded = BlockMask.dense(64, block=32).with_lengths(torch.tensor([40, 64]))
    >>> padded.bake_lengths()  # doctest: +ELLIPSIS
    BlockMask(64 x 64, blocks of 32, 8 tiles: 5 full + 3 partial (3 distinct), ... 2 patterns for 2 x 1 ...)
    >>> torch.equal(padded.bake_lengths().to_dense(), padded.to_dense())
    True

    For uses that cannot handle lengths: an export, a comparison of live scores. Every distinct pair of a pattern
    and its lengths becomes a pattern, so there may be up to B times as many tiles. Reads the lengths, so it
    synchronises with the device.

    Raises ValueError if the lengths have B = 0.
    """
    from sparseflash.blockmask.ops import padding

    return padding.bake_lengths(mask.canonical())
