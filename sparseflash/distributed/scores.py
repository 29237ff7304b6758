"""Score modifications over several ranks: from the whole problem to the tokens or heads of one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from sparseflash.blockmask.cache import BoundedDict
from sparseflash.scores.bias import Bias
from sparseflash.scores.change import Change, Scores, check_placed
from sparseflash.scores.distance import Distance
from sparseflash.scores.function import Function
from sparseflash.scores.key_bias import KeyBias
from sparseflash.scores.positions import with_positions
from sparseflash.scores.relative import Codes
from sparseflash.scores.sink import Sink
from sparseflash.scores.softcap import Softcap
from sparseflash.scores.temperature import Temperature

_of_heads = BoundedDict(32)


def tells_positions(changes: Scores) -> bool:
    """Whether a modification depends on the position of a query or a key."""
    return any(
        change.values.shape[2] > 1 if isinstance(change, Temperature) else not isinstance(change, Softcap | Sink)
        for change in changes.changes
    )


def refuse_local(changes: Scores) -> None:
    """Raises ValueError for a Triton function and for values of live tiles: both take the places of one call."""
    check_placed(changes, "over several ranks")
    if changes.find("tile_bias") is not None:
        raise ValueError(
            "scores must be without tile_bias over several ranks, whose calls have masks and tiles of their own; pass "
            "scores.bias, or a function of positions (scores.function)."
        )
    function = changes.find("function")
    if function is not None and function.kernel is not None:
        raise ValueError(
            "scores.function must be given without kernel= over several ranks, where a kernel would get places in one "
            "rank's tensors; pass the PyTorch function alone."
        )


def in_full_precision(changes: Scores) -> Scores:
    """The modifications with half-precision tensors in fp32, so that gradients are rounded once, after the sum over
    stages.
    """
    return changes.with_tensors(
        [x.float() if x.is_floating_point() and x.element_size() < 4 else x for x in changes.tensors()]
    )


def of_tokens(changes: Scores, queries: Tensor, keys: Tensor, shift: int) -> Scores:
    """The modifications, without a sink, for the queries and keys at these positions.

    `changes`: prepared for the whole problem; `queries`, `keys`: int64 `[n]`, `[m]`, on the changes' device; `shift`:
    Nk - Nq of the whole problem.
    """
    found: list[Change] = []
    for change in changes.changes:
        if isinstance(change, Temperature):
            found.append(Temperature(_taken(change.values, 2, queries)))
        elif isinstance(change, KeyBias):
            found.append(KeyBias(_taken(change.values, 2, keys)))
        elif isinstance(change, Bias):
            found.append(Bias(_taken(_taken(change.values, 2, queries), 3, keys)))
        elif isinstance(change, Codes):
            # Without ends of runs, which assume neighbouring tokens.
            codes = change.q_codes.index_select(0, queries), change.k_codes.index_select(0, keys)
            found.append(Codes(change.table, change.buckets, *codes, change.until[:0]))
        elif not isinstance(change, Distance | Function):
            found.append(change)
    distance, function = changes.find("distance"), changes.find("function")
    if distance is not None or function is not None:
        # A distance may come after the other sums; the function still comes last.
        found.append(with_positions(distance, function, shift, (queries, keys)))
    return Scores(tuple(found))


def of_heads(changes: Scores, heads: slice) -> Scores:
    """The modifications for some query heads, with all tokens."""
    found: list[Change] = []
    for change in changes.changes:
        if isinstance(change, Temperature | KeyBias | Bias):
            values = change.values
            found.append(type(change)(values[:, heads] if values.shape[1] > 1 else values))
        elif isinstance(change, Distance):
            found.append(replace(change, slopes=change.slopes[heads]))
        elif isinstance(change, Codes):
            found.append(replace(change, table=change.table[heads]))
        elif isinstance(change, Sink):
            found.append(Sink(change.logits[heads]))
        elif isinstance(change, Function):
            key = heads.start, change.identity
            made = _of_heads.get(key) or _of_heads.put(key, _from_head(change, heads.start))
            found.append(made.with_tensors(change.given))
        else:
            found.append(change)
    return Scores(tuple(found))


def _taken(x: Tensor, dim: int, positions: Tensor) -> Tensor:
    return x if x.shape[dim] == 1 else x.index_select(dim, positions)


def _from_head(function: Function, first: int) -> Function:
    def moved(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda score, b, h, q, k, *tensors: change(score, b, h + first, q, k, *tensors)

    return Function(moved(function.function), (), function.derivative and moved(function.derivative))
