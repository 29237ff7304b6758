"""Checks that an attention is exact: compares it with fp64, allowing about the error of a plain implementation.

>>> import torch
>>> from sparseflash import attention, masks, testing
>>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
>>> mask = masks.local(100, window=9)
>>> def layer(q, k, v):  # may also return (out, lse)
...     return attention(q, k, v, mask)
>>> testing.assert_exact(layer, q, k, v, mask)
>>> testing.compare(lambda q, k, v: 1.001 * layer(q, k, v), q, k, v, mask).exact
False

Rounding errors are unavoidable, and their size depends on shapes and values. So the allowed error of a result is
measured: twice the largest error of the definition when it is computed plainly in the same dtype, plus about one unit
in the last place of its largest value. `assert_exact` and `compare` apply this to any function of q, k and v.

The parts can be used separately, for results from elsewhere or other kinds of inputs. `by_definition` computes the
truth (in fp64) and the plain results (in any other dtype); `compare_results` compares given results; `sampled_heads`
and `sampled_part` choose the part of a long sequence to compare.

It may import `blockmask`, `scores`, `validation` and `backends.reference`, which is the definition.
"""

from sparseflash.testing.comparison import Comparison as Comparison
from sparseflash.testing.comparison import assert_exact as assert_exact
from sparseflash.testing.comparison import compare as compare
from sparseflash.testing.comparison import compare_results as compare_results
from sparseflash.testing.comparison import plain_errors as plain_errors
from sparseflash.testing.definition import Changes as Changes
from sparseflash.testing.definition import Inputs as Inputs
from sparseflash.testing.definition import by_definition as by_definition
from sparseflash.testing.definition import largest_score as largest_score
from sparseflash.testing.definition import results_of as results_of
from sparseflash.testing.sampling import Part as Part
from sparseflash.testing.sampling import sampled_heads as sampled_heads
from sparseflash.testing.sampling import sampled_part as sampled_part
from sparseflash.testing.yardstick import Error as Error
from sparseflash.testing.yardstick import draws_for as draws_for
from sparseflash.testing.yardstick import error_of as error_of
from sparseflash.testing.yardstick import largest_error as largest_error
from sparseflash.testing.yardstick import live_queries as live_queries
from sparseflash.testing.yardstick import plain_dtype as plain_dtype

__all__ = [
    "Changes",
    "Comparison",
    "Error",
    "Inputs",
    "Part",
    "assert_exact",
    "by_definition",
    "compare",
    "compare_results",
    "draws_for",
    "error_of",
    "largest_error",
    "largest_score",
    "live_queries",
    "plain_dtype",
    "plain_errors",
    "results_of",
    "sampled_heads",
    "sampled_part",
]
