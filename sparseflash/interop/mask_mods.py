"""FlexAttention's `mask_mod` for common masks: rules of numbers, which read no memory, and rules of runs of keys.

Rules of numbers use operators only, no `//` of tensors and the like, so they also run inside kernels of CuTe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Rule = Callable[[Any, Any, Any, Any], Any]  # (b, h, q, k) -> live


def causal(offset: int = 0) -> Rule:
    """Key k is at most the position q + offset.

    >>> causal()(0, 0, 4, 4), causal()(0, 0, 4, 5), causal(1)(0, 0, 4, 5)
    (True, False, True)
    """
    return lambda b, h, q, k: k <= q + offset


def window(left: int, right: int) -> Rule:
    """Key k lies from q - left to q + right.

    >>> [window(2, 0)(0, 0, 4, k) for k in range(6)]
    [False, False, True, True, True, False]
    """
    return lambda b, h, q, k: (k >= q - left) & (k <= q + right)


def dilated(left: int, right: int, step: int) -> Rule:
    """Every `step`-th key of a window, counted from the query's own position.

    >>> [dilated(4, 0, 2)(0, 0, 4, k) for k in range(6)]
    [True, False, True, False, True, False]
    """
    return lambda b, h, q, k: (k >= q - left) & (k <= q + right) & ((q - k) % step == 0)


def prefix(tokens: int, offset: int = 0) -> Rule:
    """The first `tokens` keys, and those up to the position q + offset.

    >>> [prefix(3)(0, 0, 1, k) for k in range(5)]
    [True, True, True, False, False]
    """
    return lambda b, h, q, k: (k < tokens) | (k <= q + offset)


def sinks(tokens: int, left: int, right: int) -> Rule:
    """The first `tokens` keys and a window, no key after q + right.

    >>> [sinks(1, 1, 0)(0, 0, 3, k) for k in range(5)]
    [True, False, True, True, False]
    """
    return lambda b, h, q, k: (k <= q + right) & ((k >= q - left) | (k < tokens))


def global_tokens(tokens: int, left: int, right: int) -> Rule:
    """A window; the first `tokens` queries see all keys, and all queries see the first `tokens` keys.

    >>> [global_tokens(1, 1, 1)(0, 0, 3, k) for k in range(6)]
    [True, False, True, True, True, False]
    """
    return lambda b, h, q, k: ((k >= q - left) & (k <= q + right)) | (q < tokens) | (k < tokens)


def runs(start: Tensor, stop: Tensor) -> Rule:
    """Keys start[q] to stop[q] - 1: two reads of memory for a query, none for a key.

    >>> import torch
    >>> [bool(runs(torch.tensor([0, 2]), torch.tensor([2, 4]))(0, 0, 1, k)) for k in range(5)]
    [False, False, True, True, False]
    """
    return lambda b, h, q, k: (k >= start[q]) & (k < stop[q])


def padded(rule: Rule, q_lengths: Tensor, k_lengths: Tensor) -> Rule:
    """A rule for the first `q_lengths[b]` queries and `k_lengths[b]` keys of each batch element.

    >>> import torch
    >>> lengths = torch.tensor([2, 3])
    >>> [bool(padded(causal(), lengths, lengths)(b, 0, 2, 0)) for b in (0, 1)]
    [False, True]
    """
    return lambda b, h, q, k: rule(b, h, q, k) & (q < q_lengths[b]) & (k < k_lengths[b])
