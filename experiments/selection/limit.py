"""How often a choice by mean keys can be right: what the idea allows, whatever is learned."""

from __future__ import annotations

import numpy as np
from scipy import stats


def share_found(dim: int, block: int, blocks: int, chosen: int, *, cosine: float = 1.0) -> float:
    """The share of queries whose one matching key is in a chosen block, if blocks are chosen by their mean keys.

    >>> [round(share_found(64, block, blocks=240, chosen=15), 2) for block in (16, 32, 64)]
    [0.68, 0.45, 0.29]

    Keys are random directions of `dim` features, one per query with this cosine to it. The mean of a block
    has the product `cosine / block` of that key, and the noise of all its keys, of variance `1 / dim` each. Times
    `block * sqrt(dim)`:

        the right block       N(cosine * sqrt(dim), block - 1)
        each other block      N(0, block)

    so the ratio of signal and noise is `cosine * sqrt(dim / block)`. The right block is chosen if fewer than `chosen`
    of the `blocks` are above it. An indexer that scores a block by its best key has no such limit.
    """
    points, weights = np.polynomial.hermite_e.hermegauss(200)
    scores = cosine * dim**0.5 + points * max(block - 1, 0) ** 0.5
    above = stats.norm.sf(scores / block**0.5)
    found = stats.binom.cdf(chosen - 1, blocks - 1, above)
    return float((weights * found).sum() / weights.sum())
