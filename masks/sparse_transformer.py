"""The Sparse Transformer's two factorised patterns, strided and fixed."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, token_counts
from sparseflash.masks.tiling.arguments import at_least, choice, head_count
from sparseflash.masks.tiling.diagonals import diagonals
from sparseflash.masks.tiling.signatures import pattern
from sparseflash.masks.tiling.spans import spans_of_heads


@pattern
def strided(q_len: int, *, stride: int, attend: str = "both", block: Block = 128) -> BlockMask:
    """The `stride` latest keys, and every `stride`-th one before them: for data with a period, such as rows of pixels.

    >>> strided(16_384, stride=128)
    BlockMask(16384 x 16384, blocks of 128, 8256 tiles: 0 full + 8256 partial (3 distinct), density 1.17 %)

    Score (q, k) is live iff `k <= q` and

        attend="local":    q - k < stride
        attend="strided":  (q - k) % stride == 0
        attend="both":     one or the other

    The paper gives the first two to different layers or heads, or merges them ("both"); two layers connect every pair.
    The tiles of "strided" are all partial and, for a stride below two blocks, all live. OpenAI's code first sorts the
    tokens by `position % stride`, which makes the mask block-diagonal and causal (`permute` does that to a mask); its
    dense form has the same sets of keys. Source: Sparse Transformer (Child et al., 2019), section 4.3.

    Args:
        q_len, stride: tokens.
        attend: "local", "strided" or "both".
        block: tokens per side of a tile.

    Raises ValueError if `stride` is not positive or `attend` is another word.

        stride 3, local     strided         both
        X . . . . .         X . . . . .     X . . . . .
        X X . . . .         . X . . . .     X X . . . .
        X X X . . .         . . X . . .     X X X . . .
        . X X X . .         X . . X . .     X X X X . .
        . . X X X .         . X . . X .     . X X X X .
        . . . X X X         . . X . . X     . . X X X X

    >>> strided(4096, stride=64, attend="strided").density < strided(4096, stride=64).density
    True
    """
    q_len, _ = token_counts(q_len, q_len)
    stride = at_least(1, stride, "stride", "tokens")
    choice(attend, "attend", ("both", "local", "strided"))
    near, far = torch.arange(min(stride, q_len), device="cpu"), torch.arange(0, q_len, stride, device="cpu")
    offsets = {"local": near, "strided": far, "both": torch.unique(torch.cat([near, far]))}[attend]
    return diagonals(offsets, q_len, block=block)


@pattern
def fixed(
    q_len: int, *, stride: int, summary: int, attend: str = "both", heads: int = 1, num_verts: int = 1,
    block: Block = 128,
) -> BlockMask:  # fmt: skip
    """The query's own chunk of `stride` tokens, and `summary` tokens of every chunk, which represent the chunk.

    >>> fixed(4096, stride=512, summary=128)
    BlockMask(4096 x 4096, blocks of 128, 192 tiles: 160 full + 32 partial (1 distinct), density 17.2 %)

    Score (q, k) of head h, with v = h % num_verts, is live iff `k <= q` and

        attend="local":    q // stride == k // stride
        attend="summary":  stride - (v + 1) * summary <= k % stride < stride - v * summary
        attend="both":     one or the other

    so with `num_verts=1` the summary is the end of each chunk, the query's own included. With a larger `num_verts`, the
    heads take turns at that number of sub-blocks of the chunk, counted from its end, as the paper advises. The mask
    then has `heads` heads; otherwise it is one pattern for all heads.

    Source: Sparse Transformer (Child et al., 2019), section 4.3; `num_verts` is OpenAI's name. Their code handles whole
    blocks only (stride and summary must be multiples of the block), and gives the same set of keys for those.
    DeepSpeed's "fixed" is another pattern, `deepspeed_fixed`.

    Args:
        q_len, stride, summary: tokens.
        attend: "local", "summary" or "both".
        heads: the heads of the mask if `num_verts` is above 1.
        num_verts: the number of sub-blocks among which heads take turns.
        block: tokens per side of a tile.

    Raises ValueError unless `1 <= num_verts * summary <= stride`, if `heads` is not positive, or if `attend` is another
    word.

        stride 3, summary 1, local     summary         both
        X . . . . .                    . . . . . .     X . . . . .
        X X . . . .                    . . . . . .     X X . . . .
        X X X . . .                    . . X . . .     X X X . . .
        . . . X . .                    . . X . . .     . . X X . .
        . . . X X .                    . . X . . .     . . X X X .
        . . . X X X                    . . X . . X     . . X X X X

    >>> fixed(4096, stride=128, summary=8, heads=8, num_verts=4)
    BlockMask(4096 x 4096, blocks of 128, 2112 tiles: 0 full + 2112 partial (5 distinct), density 4.6 %,
    4 patterns for 1 x 8 (batch x heads))
    """
    q_len, _ = token_counts(q_len, q_len)
    stride, summary = at_least(1, stride, "stride", "tokens"), at_least(1, summary, "summary", "tokens")
    heads, num_verts = head_count(heads), at_least(1, num_verts, "num_verts", "sub-blocks")
    choice(attend, "attend", ("both", "local", "summary"))
    if num_verts * summary > stride:
        raise ValueError(f"num_verts * summary must not exceed stride, {stride} tokens; got {num_verts} * {summary}.")
    q = torch.arange(q_len, device="cpu")
    stop = q + 1
    start = stop if attend == "summary" else q // stride * stride
    heads = heads if num_verts > 1 else 1
    marks: list[tuple[Tensor | None, Tensor | None]] = []
    for vert in range(min(num_verts, heads)):
        end = stride - vert * summary
        cols = (q % stride < end) & (q % stride >= end - summary) if attend != "local" else None
        marks.append((None, cols))
    pattern_of = [head % num_verts for head in range(heads)]
    return spans_of_heads(start, stop, q_len, marks, pattern_of, limit=stop, block=block)
