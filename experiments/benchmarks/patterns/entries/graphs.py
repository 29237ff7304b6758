"""Random graphs of blocks have no formula."""

from __future__ import annotations

from experiments.benchmarks.patterns.entries.pattern import Pattern
from sparseflash import masks

PATTERNS: list[Pattern] = [
    Pattern("bigbird", "random", "|i - j| <= 1, or i or j the first or last block, or j one of 3 drawn for i",
        lambda n, block: masks.bigbird(n, block=block)),
    Pattern("bigbird, per head", "random", "the same, drawn anew for each of 4 heads",
        lambda n, block: masks.bigbird(n, heads=4, block=block)),
    Pattern("deepspeed_bigbird", "random", "|i - j| <= 1, or i or j the first block, or j one drawn for i",
        lambda n, block: masks.deepspeed_bigbird(n, block=block)),
    Pattern("deepspeed_bigbird, causal", "random", "the same, drawn from the past, and k <= q",
        lambda n, block: masks.deepspeed_bigbird(n, causal=True, block=block), causal=True),
    Pattern("random_blocks", "random", "i = j, or j one of 3 drawn for i",
        lambda n, block: masks.random_blocks(n, count=3, block=block)),
    Pattern("random_blocks, causal", "random", "i = j and k <= q, or j one of 3 drawn from the past of i",
        lambda n, block: masks.random_blocks(n, count=3, causal=True, block=block), causal=True),
    Pattern("expander", "random", "i = j, or neighbours on one of 3 random cycles through all blocks",
        lambda n, block: masks.expander(n, degree=6, block=block)),
]  # fmt: skip
