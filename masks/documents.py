"""Packed documents: several sequences in one that must not see one another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, flag, integers
from sparseflash.masks.tiling.signatures import pattern
from sparseflash.masks.tiling.spans import spans


@pattern
def documents(lengths: Any, k_lengths: Any = None, *, causal: bool = False, block: Block = 128) -> BlockMask:
    """Documents packed one behind the other: a query sees the keys of its own document (block-diagonal attention).

    >>> documents([1000, 3000, 96])
    BlockMask(4096 x 4096, blocks of 128, 688 tiles: 578 full + 110 partial (10 distinct), density 59.7 %)

    Score (q, k), with d the document of query q and of key k, is live iff

        d(q) == d(k)                                                   (bidirectional)
        d(q) == d(k)  and  k - kstart(d) <= q - qstart(d) + klen(d) - qlen(d)      (causal)

    With as many keys as queries, the default, the causal rule is `d(q) == d(k) and k <= q`. Otherwise each document is
    aligned at the bottom right, as in `causal` and in FlashAttention's variable-length functions (whose `cu_seqlens`
    are the running sums of `lengths`). xformers calls it BlockDiagonalMask and BlockDiagonalCausalFromBottomRightMask;
    FlexAttention examples, a document mask.

    Args:
        lengths: tokens of each document, in order (list of ints or 1-D integer tensor or array); an empty document is
            allowed.
        k_lengths: the same for keys, if they differ.
        causal: no query sees a key after it.
        block: tokens per side of a tile.

    From running sums take the differences, `cu_seqlens.diff()`. From a document number for every token, as in
    FlexAttention's examples, take `ids.unique_consecutive(return_counts=True)[1]`. (If the tokens of a document do not
    lie together: `BlockMask.from_function(lambda q, k: ids[q] == ids[k], N)`.) To pad up to a fixed number of tokens,
    add a last document and cut it off: `documents([100, 150, 50]).with_lengths([250])`.

    Raises TypeError or ValueError if lengths are not integers, one is negative, or all are 0.

        lengths 1, 3, 2     causal
        X . . . . .         X . . . . .
        . X X X . .         . X . . . .
        . X X X . .         . X X . . .
        . X X X . .         . X X X . .
        . . . . X X         . . . . X .
        . . . . X X         . . . . X X

    >>> documents([1, 2], causal=True, block=16).to_dense()[0, 0].int().tolist()
    [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    >>> documents(torch.tensor([0, 1000, 4000, 4096]).diff()) == documents([1000, 3000, 96])
    True
    >>> documents([100, 150, 50]).with_lengths([250]).to_dense().sum().item() == 100**2 + 150**2
    True
    """
    q_sizes = _sizes(lengths, "lengths")
    k_sizes = q_sizes if k_lengths is None else _sizes(k_lengths, "k_lengths")
    if len(q_sizes) != len(k_sizes):
        raise ValueError(
            f"k_lengths must have one entry a document, {len(q_sizes)} as lengths has; got {len(k_sizes)}."
        )
    q_stops, k_stops = q_sizes.cumsum(0), k_sizes.cumsum(0)
    document = torch.repeat_interleave(torch.arange(len(q_sizes), device="cpu"), q_sizes)
    start, stop = (k_stops - k_sizes)[document], k_stops[document]
    if flag(causal, "causal"):
        stop = stop - (q_stops[document] - 1 - torch.arange(len(document), device="cpu"))
    return spans(start, stop, int(k_stops[-1]), block=block)


def _sizes(lengths: Any, name: str) -> Tensor:
    sizes = integers(lengths, name)
    if bool((sizes < 0).any()):
        raise ValueError(f"{name} must not be negative; got {int(sizes.min())}.")
    if int(sizes.sum()) == 0:
        raise ValueError(f"{name} must have at least one token; got {sizes.tolist()}.")
    return sizes
