"""Checks that an attention is exact, by comparing it with dense attention in fp64.

A result passes if its error is at most twice the error of plain PyTorch in the same dtype on the same inputs, plus one
rounding unit.

>>> import torch
>>> from sparseflash import attention, masks, testing
>>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
>>> mask = masks.local(100, window=9)
>>> def layer(q, k, v):  # may also return (out, lse)
...     return attention(q, k, v, mask)
>>> testing.assert_exact(layer, q, k, v, mask)
>>> testing.compare(lambda q, k, v: 1.001 * layer(q, k, v), q, k, v, mask).exact
False

`assert_exact` raises if a result does not pass, `compare` returns all errors; both take any function of q, k and v.
"""

from sparseflash.testing.comparison import Comparison, assert_exact, compare, compare_results, plain_errors
from sparseflash.testing.definition import Changes, Inputs, by_definition, largest_score, results_of
from sparseflash.testing.sampling import Part, sampled_heads, sampled_part
from sparseflash.testing.yardstick import Error, draws_for, error_of, largest_error, live_queries, plain_dtype

__all__ = [
    "Changes", "Comparison", "Error", "Inputs", "Part", "assert_exact", "by_definition", "compare", "compare_results",
    "draws_for", "error_of", "largest_error", "largest_score", "live_queries", "plain_dtype", "plain_errors",
    "results_of", "sampled_heads", "sampled_part",
]  # fmt: skip
