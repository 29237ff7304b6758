"""The operators of `BlockMask`: & | ^ - ~."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from sparseflash.blockmask.arguments import checked_mask
from sparseflash.blockmask.methods import mask_method, method
from sparseflash.blockmask.remedies import refuse

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask


@mask_method
def __and__(mask: BlockMask, other: BlockMask) -> BlockMask:
    """`a & b`: the scores that are live in both.

    >>> from sparseflash import masks
    >>> both = masks.local(256, window=65, block=32) & masks.causal(256, block=32)
    >>> both == masks.local(256, window=33, causal=True, block=32)
    True

    For `&`, `|`, `^` and `-` alike, the masks must have equal `q_len`, `k_len` and device, or a ValueError is
    raised; batch sizes and heads broadcast. If the block sizes differ, the result has the smaller one in each
    dimension. Bits are combined once per distinct pair of tiles.

    For `&`, padding stays padding: the smaller of the two lengths applies. Time and memory are proportional to the
    live tiles of the sparser mask (for `|` and `^`: of both masks; for `-`: of the left one).
    """
    from sparseflash.blockmask.ops.boolean import intersection

    return intersection(mask, checked_mask(other))


@mask_method
def __or__(mask: BlockMask, other: BlockMask) -> BlockMask:
    """`a | b`: the scores that are live in a, in b, or in both. See `&`.

    >>> from sparseflash import masks
    >>> masks.local(4096, window=256) | masks.butterfly(4096)
    BlockMask(4096 x 4096, blocks of 128, 222 tiles: 192 full + 30 partial (2 distinct), density 20.2 %)

    Equal lengths stay lengths; different ones are first written into the tiles (`bake_lengths`).
    """
    from sparseflash.blockmask.ops.boolean import union

    return union(mask, checked_mask(other))


@mask_method
def __xor__(mask: BlockMask, other: BlockMask) -> BlockMask:
    """`a ^ b`: the scores that are live in exactly one. See `&`, and `|` for lengths.

    >>> from sparseflash import masks
    >>> (masks.causal(64, block=32) ^ masks.causal(64, block=32)).density
    0.0
    """
    from sparseflash.blockmask.ops.boolean import symmetric_difference

    return symmetric_difference(mask, checked_mask(other))


@mask_method
def __sub__(mask: BlockMask, other: BlockMask) -> BlockMask:
    """`a - b`: the scores that are live in a but not in b, that is `a & ~b` without building `~b`. See `&`.

    >>> from sparseflash import masks
    >>> masks.causal(100, block=32) - masks.local(100, window=8, causal=True, block=32) == BlockMask.from_function(
    ...     lambda q, k: k <= q - 8, 100, block=32)
    True

    The lengths of a stay lengths. If any length of b is shorter than a's, the lengths of b are first written into
    its tiles: a score that is padding in b is not live in b, so it stays live.
    """
    from sparseflash.blockmask.ops.boolean import difference

    return difference(mask, checked_mask(other))


@mask_method
def __invert__(mask: BlockMask) -> BlockMask:
    """`~a`: the scores that are dead in a; the negation of `to_dense()`.

    >>> from sparseflash import masks
    >>> ~masks.causal(256, block=64) == BlockMask.from_function(lambda q, k: k > q, 256, block=64)
    True

    Padding becomes live, so lengths are first written into the tiles (`bake_lengths`). Positions past `q_len` and
    `k_len` do not exist and stay dead. The complement of a sparse mask is dense: time and memory are proportional
    to all `Mq * Mk` tiles. For `a & ~b` write `a - b`.

    Under `torch.compile(fullgraph=True)` write `masks.dense(q_len, k_len) - a`, which has the same live scores: PyTorch
    up to 2.13 cannot trace `~` of a mask. Without `fullgraph` the graph breaks there.
    """
    from sparseflash.blockmask.ops.boolean import complement

    return complement(mask.canonical())


@method
def __add__(mask: BlockMask, other: object) -> NoReturn:
    """Raises TypeError: masks are combined with &, | and ~."""
    refuse("sum")
