"""DeepSpeed's "Fixed" layout, which is not the Sparse Transformer's."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import flag
from sparseflash.masks.tiling.arguments import at_least, head_count, square_blocks
from sparseflash.masks.tiling.signatures import pattern
from sparseflash.masks.tiling.spans import spans_of_heads


@pattern
def deepspeed_fixed(
    q_len: int, *, local_blocks: int = 4, global_blocks: int = 1, horizontal: bool = False, heads: int = 1,
    global_patterns: int = 1, causal: bool = False, block: int = 128,
) -> BlockMask:  # fmt: skip
    """Chunks of `local_blocks` blocks, and the last blocks of every chunk as columns (DeepSpeed's "fixed").

    >>> deepspeed_fixed(4096)
    BlockMask(4096 x 4096, blocks of 128, 352 tiles: 352 full + 0 partial, density 34.4 %)

    With `i = q // block`, `j = k // block`, L local and g global blocks and nb blocks in all, score (q, k) of head h is
    live iff

        i // L == j // L                                            (the query's own chunk)
        or  j in G(h)                                               (global blocks, seen by every query)
        or  i in G(h), if horizontal                                (and seeing every key)

    and, if `causal`, `k <= q`. G(h) has g blocks of each chunk, from `L - (1 + h % P) * g` on, where P is
    `global_patterns`; if the last chunk has fewer than L blocks, they are the g blocks that start at that position or,
    if it lies past the end, the last g blocks of the sequence.

    Source: `FixedSparsityConfig.make_layout` of DeepSpeed (deepspeed/ops/sparse_attention/sparsity_config.py). Here
    lengths need not be multiples of the block. `causal` is causal to the token (DeepSpeed's
    `attention="unidirectional"` in blocks only) and drops global blocks ahead of the query, which DeepSpeed's queries
    see when `num_global_blocks > 1`. Unlike the Sparse Transformer's `fixed`, the pattern is made of blocks and has a
    bidirectional form.

    Args:
        q_len: tokens.
        local_blocks, global_blocks: L and g, DeepSpeed's `num_local_blocks` and `num_global_blocks`.
        causal: no query sees a key after it.
        horizontal: global blocks also see every key, DeepSpeed's `horizontal_global_attention`.
        heads: the mask has this number of heads if P > 1.
        global_patterns: P, DeepSpeed's `num_different_global_patterns`.
        block: tokens per side of a tile.

    The defaults are DeepSpeed's, except that its block is 16. Raises ValueError unless g divides L and `P <= L // g`,
    if a number is not positive, or for `horizontal` with `causal`.

        L 3, 7 blocks     horizontal          causal
        X X X . . X X     X X X . . X X       \\ . . . . . .
        X X X . . X X     X X X . . X X       X \\ . . . . .
        X X X . . X X     X X X X X X X       X X \\ . . . .
        . . X X X X X     . . X X X X X       . . X \\ . . .
        . . X X X X X     . . X X X X X       . . X X \\ . .
        . . X X X X X     X X X X X X X       . . X X X \\ .
        . . X . . X X     X X X X X X X       . . X . . X \\

    >>> deepspeed_fixed(4096, heads=8, global_patterns=4).shape
    (1, 8, 4096, 4096)
    """
    q_len, block, count = square_blocks(q_len, block, "DeepSpeed's")
    local = at_least(1, local_blocks, "local_blocks", "blocks")
    wide = at_least(1, global_blocks, "global_blocks", "blocks")
    heads = head_count(heads)
    patterns = at_least(1, global_patterns, "global_patterns", "patterns")
    if local % wide:
        raise ValueError(f"global_blocks must divide local_blocks, {local}; got {wide}.")
    if patterns > local // wide:
        raise ValueError(
            f"global_patterns must be at most local_blocks // global_blocks, {local // wide}; got {patterns}."
        )
    causal, horizontal = flag(causal, "causal"), flag(horizontal, "horizontal")
    if causal and horizontal:
        raise ValueError("horizontal must be False with causal; got True.")
    q = torch.arange(q_len, device="cpu")
    start = q // block // local * local * block
    stop = torch.minimum(start + local * block, q + 1) if causal else start + local * block
    whole = count - count % local
    heads = heads if patterns > 1 else 1
    marks: list[tuple[Tensor | None, Tensor | None]] = []
    for number in range(min(patterns, heads)):
        first = local - (1 + number) * wide
        starts = list(range(first, whole, local))
        if whole < count:
            starts.append(max(min(whole + first, count - wide), 0))
        seen = (torch.tensor(starts, device="cpu")[:, None] + torch.arange(min(wide, count), device="cpu")).reshape(-1)
        of_block = torch.zeros(count, dtype=torch.bool, device="cpu")
        of_block[seen[seen < count]] = True
        marked = of_block[q // block]
        marks.append((marked if horizontal else None, marked))
    pattern_of = [head % patterns for head in range(heads)]
    return spans_of_heads(start, stop, q_len, marks, pattern_of, limit=q + 1 if causal else None, block=block)
