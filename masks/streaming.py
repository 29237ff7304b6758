"""Attention sinks: the first tokens and a causal window, for streams and long prompts."""

from __future__ import annotations

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, token_counts
from sparseflash.masks.tiling.arguments import at_least, with_cache
from sparseflash.masks.tiling.signatures import pattern
from sparseflash.masks.tiling.spans import spans


@pattern
def streaming(
    q_len: int, k_len: int | None = None, *, window: int, sink: int, offset: int | None = None, block: Block = 128
) -> BlockMask:
    """A causal window of `window` keys, and the first `sink` keys, which every query sees (attention sinks).

    >>> streaming(4096, window=512, sink=4)
    BlockMask(4096 x 4096, blocks of 128, 177 tiles: 90 full + 87 partial (4 distinct), density 11.8 %)

    Score (q, k), with p = q + offset the position of query q among the keys, is live iff

        k <= p  and  (p - window < k  or  k < sink)

    so a query sees `window` keys, its own included, and up to `sink` keys before these; fewer near the start. With a
    cache of earlier keys (`k_len > q_len`) the last query is the last key, as in `causal`: `offset` is `k_len - q_len`
    by default.

    Source: StreamingLLM (Xiao et al., 2024, section 3.2). Its rolling cache holds `window + sink` keys, as a row of
    this mask does; its positions, which it counts within the cache, do not concern the mask. MIT's
    Block-Sparse-Attention has the same rule for tokens (`exact_streaming`) and another that is rounded to blocks.

    Args:
        q_len, k_len: tokens; `k_len` defaults to `q_len`.
        window, sink: keys.
        offset: the position of query 0 among the keys.
        block: tokens per side of a tile.

    Raises ValueError if `window` is not positive or `sink` negative.

        window 2, sink 1
        X . . . .
        X X . . .
        X X X . .
        X . X X .
        X . . X X

    >>> streaming(1, 5, window=2, sink=1, block=16).to_dense()[0, 0].int().tolist()
    [[1, 0, 0, 1, 1]]
    """
    q_len, k_len, offset = with_cache(q_len, k_len, offset)
    window, sink = at_least(1, window, "window", "keys"), at_least(0, sink, "sink", "keys")
    return _sink_and_window(q_len, k_len, offset, window, sink, 0, block)


@pattern
def a_shape(q_len: int, *, sink: int, local: int, block: Block = 128) -> BlockMask:
    """MInference's A-shape: the first `sink` keys, the query's own, and the `local` keys before it.

    >>> a_shape(4096, sink=128, local=1023) == streaming(4096, window=1024, sink=128)
    True

    Score (q, k) is live iff

        k <= q  and  (q - k <= local  or  k < sink)

    which is `streaming(q_len, window=local + 1, sink=sink)`: MInference counts the keys of its window without the
    query's own (`triu(-local)`). Source: MInference (Jiang et al., 2024, section 3.2), pattern `stream_llm` of its
    code.

    Args:
        q_len: tokens.
        sink, local: keys.
        block: tokens per side of a tile.

    Raises ValueError if `sink` or `local` is negative.

        sink 1, local 1
        X . . . .
        X X . . .
        X X X . .
        X . X X .
        X . . X X
    """
    q_len, _ = token_counts(q_len, q_len)
    sink, local = at_least(0, sink, "sink", "keys"), at_least(0, local, "local", "keys")
    return _sink_and_window(q_len, q_len, 0, local + 1, sink, 0, block)


@pattern
def tri_shape(q_len: int, *, sink: int, local: int, last: int, block: Block = 128) -> BlockMask:
    """`a_shape`, in which the last `last` queries also see every earlier key.

    >>> tri_shape(4096, sink=128, local=1024, last=0) == a_shape(4096, sink=128, local=1024)
    True

    Score (q, k) is live iff

        k <= q  and  (q - k <= local  or  k < sink  or  q >= q_len - last)

    The last queries of a prompt are usually its question, whose answer may be anywhere in the prompt. Source: SCBench
    (Li et al., 2025) and its kernel `tri_shape_kernel` in MInference.

    Args:
        q_len: tokens.
        sink, local: keys.
        last: queries.
        block: tokens per side of a tile.

    Raises ValueError if one of `sink`, `local` and `last` is negative.

        sink 1, local 1, last 1
        X . . . .
        X X . . .
        X X X . .
        X . X X .
        X X X X X
    """
    q_len, _ = token_counts(q_len, q_len)
    sink, local = at_least(0, sink, "sink", "keys"), at_least(0, local, "local", "keys")
    last = at_least(0, last, "last", "queries")
    return _sink_and_window(q_len, q_len, 0, local + 1, sink, last, block)


def _sink_and_window(q_len: int, k_len: int, offset: int, window: int, sink: int, last: int, block: Block) -> BlockMask:
    q, k = torch.arange(q_len, device="cpu"), torch.arange(k_len, device="cpu")
    p = q + offset
    rows = q >= q_len - last if last else None
    return spans(p - window + 1, p + 1, k_len, limit=p + 1, rows=rows, cols=k < sink, block=block)
