from __future__ import annotations

import torch

from sparseflash import BlockMask, scores
from sparseflash.scores.change import Change


def change(kind: str, mask: BlockMask, heads: int, dtype: torch.dtype = torch.float32) -> Change:
    """A score modification of a kind, for as many queries as keys; `dtype`: of values for pairs."""
    slopes, n = torch.ones(heads), mask.k_len
    made = {
        "softcap": lambda: scores.softcap(30.0),
        "alibi": lambda: scores.alibi(slopes),
        "log": lambda: scores.log_decay(slopes),
        "sink": lambda: scores.sink(slopes),
        "table": lambda: scores.relative(torch.ones(heads, 32), scores.t5_buckets()),
        "grid": lambda: scores.relative_2d(torch.ones(heads, 15, 2 * (n // 8) - 1), 8, n // 8),
        "key_bias": lambda: scores.key_bias(torch.ones(1, heads, n)),
        "bias": lambda: scores.bias(torch.ones(1, heads, n, n, dtype=dtype)),
        "tile_bias": lambda: scores.tile_bias(
            torch.ones(1, heads, len(mask.indices), mask.block_q, mask.block_k, dtype=dtype), mask
        ),
    }
    return made[kind]()
