"""Patterns chosen from seeded queries and keys that change slowly."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from experiments.benchmarks.patterns.entries.pattern import CHOSEN, Pattern
from sparseflash import BlockMask, masks

GROUP = "chosen from data, seeded here"


@lru_cache(maxsize=1)  # so that building again times only the choice
def queries_and_keys(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shared, own = torch.randn(2, 1, 32, max(2, tokens // 64), generator=generator)
    q, k = (
        interpolate(x, size=tokens, mode="linear", align_corners=True).transpose(1, 2)[:, None]
        for x in (shared + own, shared)
    )
    return 2 * q, 2 * k


@lru_cache(maxsize=1)
def drawn_keys(tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(tokens, (-(-tokens // 16), 16), generator=generator).repeat_interleave(16, 0)[:tokens]


def scored(tokens: int, block: int) -> Tensor:
    return masks.pooled_scores(*queries_and_keys(tokens), block=block)


def runs(tokens: int, span: int) -> Tensor:
    q, k = queries_and_keys(tokens)
    scores = q @ k.unflatten(2, (-1, span)).mean(3).transpose(2, 3)
    return scores.scatter(3, (torch.arange(tokens, device=q.device) // span)[None, None, :, None], torch.inf)


def top_k_keys(tokens: int, block: int) -> BlockMask:
    span = min(64, tokens)
    return masks.top_k_keys(runs(tokens, span), k=3, k_len=tokens, span=span, causal=True, block=block)


PATTERNS: list[Pattern] = [
    Pattern("top_k_blocks", GROUP, "k <= q and j among the 6 with the highest pooled scores, first and own included",
        lambda n, block: masks.top_k_blocks(
            scored(n, block), k=6, q_len=n, block=block, causal=True, sink_blocks=1, local_blocks=1
        ), tokens=CHOSEN, chosen=True, causal=True),
    Pattern("mass_blocks", GROUP, "the fewest blocks that hold 90 % of the softmax of the pooled scores of i",
        lambda n, block: masks.mass_blocks(scored(n, block), mass=0.9, q_len=n, block=block),
        tokens=CHOSEN, chosen=True),
    Pattern("mass_blocks, antidiagonal", GROUP,
        "k <= q and the fewest blocks that hold 90 % by antidiagonals, own included (XAttention)",
        lambda n, block: masks.mass_blocks(
            masks.antidiagonal_scores(*queries_and_keys(n), block=block, stride=16, causal=True), mass=0.9, q_len=n,
            block=block, causal=True, local_blocks=1,
        ), tokens=CHOSEN, chosen=True, causal=True),
    Pattern("top_k_keys", GROUP, "k <= q and k in q's own run of 64 keys or in its 2 highest scoring ones (MoBA)",
        top_k_keys, tokens=CHOSEN, chosen=True, causal=True),
    Pattern("selected_keys", GROUP, "k <= q and k one of 16 keys given for q (drawn at random for each 16 queries)",
        lambda n, block: masks.selected_keys(drawn_keys(n), k_len=n, causal=True, block=block),
        tokens=CHOSEN, chosen=True, causal=True),
]  # fmt: skip
