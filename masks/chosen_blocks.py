"""Blocks chosen by their scores, at every step if needed: the best k of a row, or the fewest that hold a share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, block_pair, check_block_count, flag, token_counts
from sparseflash.blockmask.by_name import by_name
from sparseflash.masks import fused
from sparseflash.masks.tiling.arguments import at_least, head_count
from sparseflash.masks.tiling.chosen import SHARE_UNITS, Frame, as_heads, dynamic_mask, frame, mask_of_blocks


@by_name
@torch.no_grad()
def top_k_blocks(
    scores: Tensor, *, k: int, q_len: int, k_len: int | None = None, block: Block = 128, causal: bool = False,
    sink_blocks: int = 0, local_blocks: int = 0, group: int = 1,
) -> BlockMask:  # fmt: skip
    """The k blocks of keys with the highest scores, for every block of queries.

    >>> from sparseflash.masks import pooled_scores
    >>> q, k = torch.randn(1, 4, 1000, 32), torch.randn(1, 2, 1000, 32)
    >>> mask = top_k_blocks(pooled_scores(q, k, block=64), k=4, q_len=1000, block=64, causal=True, local_blocks=1)
    >>> mask.shape, len(mask.indices), bool(mask.to_dense().triu(1).any())
    ((1, 4, 1000, 1000), 232, False)

    Score (q, t) of head h with `i = q // block_q`, `j = t // block_k` is live iff

        scores[b, h, i, j] is among the k highest of row i   (and, if causal, t <= q + k_len - q_len)

    where, if causal, only tiles with a score at or before the diagonal are candidates. A row with fewer than k
    candidates keeps them all. Of equal scores the first block wins. A block that scores -inf or NaN is never chosen.

    The first `sink_blocks` blocks, and the blocks nearer than `local_blocks` to the diagonal (1: those that cross it),
    are always among the k, whatever their scores; MoBA and NSA count them in the same way. The diagonal ends at the
    bottom right, as in `masks.causal`.

    Args:
        scores: floating `[Mq, Mk]`, `[H, Mq, Mk]` or `[B, H, Mq, Mk]`, one for each tile, as `pooled_scores` returns
            them. No gradient flows through the choice.
        k: blocks of a row.
        q_len, k_len: tokens; `k_len` defaults to `q_len`.
        block: tokens per side of a tile.
        causal: no query sees a key after it.
        sink_blocks, local_blocks: blocks that are always chosen, at the start and at the diagonal.
        group: the number of query heads that share the choice of one head of `scores`.

    The mask is dynamic (see `BlockMask`) and lies on the device of `scores`, with room for k tiles in each row. The
    host does not wait for the device, so the mask can be made at every step. The same scores give the same mask, also
    when activation checkpointing chooses again. Parts that depend on lengths alone are made on the CPU at the first
    call and cached. `torch.compile(fullgraph=True)` traces scores, choice and attention as one graph, and compiles
    again for each length (PyTorch refuses `dynamic=True`).

    Source: top-k over pooled scores in MInference's block-sparse heads (Jiang et al., 2024), VSA (Zhang et al., 2025)
    and, with learned scores, SeerAttention (Gao et al., 2024); SpargeAttn offers it beside its threshold
    (`mass_blocks`). MoBA (Lu et al., 2025), NSA (Yuan et al., 2025) and Quest (Tang et al., 2024) let every query
    choose for itself: `top_k_keys(span=...)`.

    Raises ValueError unless `scores` has one score for each tile and k is at least 1 and at least the number of blocks
    that a row always keeps.

        k = 2, causal, local_blocks = 1
        scores         mask
        .9 .3 .5 .1    \\ . . .
        .2 .8 .7 .4    X \\ . .
        .1 .6 .2 .9    . X \\ .
        .5 .3 .4 .0    X . . \\
    """
    scores, of = _checked(scores, q_len, k_len, block, causal, sink_blocks, local_blocks)
    return _mask_of(scores, of, _enough(k, "k", of), None, head_count(group, "group", "query heads"))


@by_name
@torch.no_grad()
def mass_blocks(
    scores: Tensor, *, mass: float, q_len: int, k_len: int | None = None, block: Block = 128, causal: bool = False,
    sink_blocks: int = 0, local_blocks: int = 0, most: int | None = None, group: int = 1,
) -> BlockMask:  # fmt: skip
    """The fewest blocks of keys that hold a share `mass` of the softmax of each row of scores.

    >>> p = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    >>> [mass_blocks(p.log(), mass=m, q_len=16, k_len=64, block=16).density for m in (0.4, 0.7, 0.9, 1.0)]
    [0.25, 0.5, 0.75, 1.0]

    Let p be the softmax of row i over the blocks that may be chosen (if causal, those with a score at or before the
    diagonal), in descending order. Blocks are kept until their sum reaches `mass`:

        block r of the order is live iff  p_1 + ... + p_(r-1) < mass

    `sink_blocks` and `local_blocks`, as in `top_k_blocks`, come first in that order, and their share counts, as in
    XAttention; other systems add these blocks afterwards. Of equal blocks the earlier comes first.

    Args:
        scores: logits, as `pooled_scores` and `antidiagonal_scores` return them, shaped as for `top_k_blocks`; pass the
            `log()` of probabilities.
        mass: a share, above 0 and at most 1; 1 keeps every block that does not score -inf or NaN.
        most: the most blocks of a row; by default all. The mask reserves room for this number in each row, so a smaller
            one takes less memory and time, and bounds the work of a step.
        q_len, k_len, block, causal, sink_blocks, local_blocks, group: as for `top_k_blocks`.

    Shares are added exactly, in units of 2^-40, so every run makes the same choice. For everything else see
    `top_k_blocks`.

    Source: the threshold tau of XAttention (Xu et al., 2025, section 2.2; over `antidiagonal_scores`), tau of
    SpargeAttn (Zhang et al., 2025; over pooled scores), gamma of FlexPrefill (Lai et al., 2025).

    Raises ValueError unless `0 < mass <= 1`, and if `most` is less than the blocks that a row always keeps.
    """
    scores, of = _checked(scores, q_len, k_len, block, causal, sink_blocks, local_blocks)
    mass = _share(mass)
    most = scores.shape[-1] if most is None else _enough(most, "most", of)
    return _mask_of(scores, of, most, mass, head_count(group, "group", "query heads"))


def _checked(
    scores: Tensor, q_len: int, k_len: int | None, block: Block, causal: bool, sink_blocks: int, local_blocks: int
) -> tuple[Tensor, Frame]:
    block_q, block_k = block_pair(block)
    q_len, k_len = token_counts(q_len, q_len if k_len is None else k_len)
    scores = as_heads("scores", scores, "Mq, Mk", floating=True)
    check_block_count("scores", scores, q_len, k_len, block_q, block_k)
    sink, local = (
        at_least(0, value, name, "blocks")
        for value, name in ((sink_blocks, "sink_blocks"), (local_blocks, "local_blocks"))
    )
    return scores, frame(q_len, k_len, (block_q, block_k), flag(causal, "causal"), sink, local, scores.device)


def _enough(value: int, name: str, of: Frame) -> int:
    value = at_least(1, value, name, "blocks")
    if value < of.forced_in_row:
        raise ValueError(
            f"{name} must be at least the {of.forced_in_row} blocks that sink_blocks and local_blocks keep in some "
            f"row; got {value}."
        )
    return value


def _share(mass: Any) -> float:
    if isinstance(mass, bool) or not isinstance(mass, int | float):
        raise TypeError(f"mass must be a number; got {mass!r}.")
    if not 0 < mass <= 1:
        raise ValueError(f"mass must be above 0 and at most 1; got {mass}.")
    return float(mass)


def _mask_of(scores: Tensor, of: Frame, most: int, mass: float | None, group: int) -> BlockMask:
    batch, heads, rows, cols = scores.shape
    most = min(most, cols)
    if scores.dtype in fused.DTYPES and fused.serves(scores, rows, cols):
        from sparseflash.masks.fused.rows import tiles_of_rows  # imports Triton

        return dynamic_mask(of, *tiles_of_rows(scores, of, most, mass), of.bits, (batch, heads), group)
    order, clean, usable = _ranked(scores, of)
    best = order[..., :most]
    if mass is None:
        kept = torch.zeros_like(usable).scatter_(-1, best, True) & usable
    else:
        kept = torch.zeros_like(usable).scatter_(-1, best, _holding(clean, order, mass)[..., :most])
        kept = (kept | of.forced) & usable
    return mask_of_blocks(of, kept, most, group)


def _ranked(scores: Tensor, of: Frame) -> tuple[Tensor, Tensor, Tensor]:
    """The columns of each row, forced ones first, then by score; their scores, or -inf; and which may be kept."""
    scored = of.open & (scores > -torch.inf)  # False for NaN
    # Finite, so that no score is as high as a forced block, and the softmax has no inf - inf.
    clean = torch.where(scored, scores.clamp(max=torch.finfo(scores.dtype).max), -torch.inf)
    order = clean.masked_fill(of.forced, torch.inf).sort(dim=-1, descending=True, stable=True).indices
    return order, clean, scored | of.forced


def _holding(clean: Tensor, order: Tensor, mass: float) -> Tensor:
    """Whether each block of the order is needed to hold the share, bool like the order."""
    if mass == 1.0:  # including blocks of weight 0
        return torch.ones_like(order, dtype=torch.bool)
    weights = torch.softmax(clean, -1, dtype=torch.promote_types(clean.dtype, torch.float32))
    # NaN: no block of the row may be chosen by its score.
    units = (weights.nan_to_num(0.0) * SHARE_UNITS).to(torch.int64).gather(-1, order)
    running = units.cumsum(-1)
    return (running - units) < running[..., -1:].double() * mass
