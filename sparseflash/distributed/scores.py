"""Score modifications over several ranks: from the whole problem to the tokens or heads of one call.

Modifications that depend on positions use positions in the whole sequence: tensors along tokens are indexed by them,
and functions are called with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from sparseflash.blockmask.cache import BoundedDict
from sparseflash.scores.bias import Bias
from sparseflash.scores.change import Change, Scores
from sparseflash.scores.distance import Distance
from sparseflash.scores.function import Function
from sparseflash.scores.key_bias import KeyBias
from sparseflash.scores.relative import Codes
from sparseflash.scores.sink import Sink
from sparseflash.scores.softcap import Softcap
from sparseflash.scores.temperature import Temperature

# Functions of local places that call functions of whole places, kept so that each is recorded for the kernels once, not
# at every step or stage. A program that keeps making new functions loses old ones.
_placed = BoundedDict(32)


def tells_positions(changes: Scores) -> bool:
    """Whether a modification depends on the position of a query or a key."""
    return any(
        change.values.shape[2] > 1 if isinstance(change, Temperature) else not isinstance(change, Softcap | Sink)
        for change in changes.changes
    )


def refuse_local(changes: Scores) -> None:
    """Raises ValueError for a Triton function and for values of live tiles: both take the places of one call."""
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
    """The modifications, none of which may be a sink, for the queries and keys at these positions.

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
        found.append(_with_positions(distance, function, shift, (queries, keys)))
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
            key = "heads", heads.start, change.identity
            made = _placed.get(key) or _placed.put(key, _from_head(change, heads.start))
            found.append(made.with_tensors(change.given))
        else:
            found.append(change)
    return Scores(tuple(found))


def _taken(x: Tensor, dim: int, positions: Tensor) -> Tensor:
    return x if x.shape[dim] == 1 else x.index_select(dim, positions)


def _with_positions(
    distance: Distance | None, function: Function | None, shift: int, positions: tuple[Tensor, Tensor]
) -> Change:
    key = shift, distance and distance.is_log, function and function.identity
    made = _placed.get(key) or _placed.put(key, _of_positions(distance, function, shift))
    slopes = [] if distance is None else [distance.slopes]
    changed: Change = made.with_tensors((*positions, *slopes, *(() if function is None else function.given)))
    return changed


def _of_positions(distance: Distance | None, function: Function | None, shift: int) -> Function:
    """A distance and a function of whole places, as a function of local places.

    Its tensors are the positions of queries and keys, the slopes if a distance is given, and the function's own.
    """
    is_log = None if distance is None else distance.is_log

    def placed(change: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
        def changed(
            score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, *tensors: Tensor
        ) -> Tensor:
            query, key = queries[q], keys[k]
            if is_log is not None:
                slopes, *tensors = tensors  # type: ignore[assignment]
                far = (query + shift - key).abs().to(score.dtype)
                score = score - slopes[h].to(score.dtype) * (far.log1p() if is_log else far)
            return score if change is None else change(score, b, h, query, key, *tensors)

        return changed

    if function is None:
        return Function(placed(None), ())
    derivative = None if function.derivative is None else placed(function.derivative)
    return Function(placed(function.function), (), derivative)


def _from_head(function: Function, first: int) -> Function:
    """A function of all heads as a function of the heads from `first` on; without its tensors."""

    def moved(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *tensors: Tensor) -> Tensor:
            return change(score, b, h + first, q, k, *tensors)

        return changed

    return Function(moved(function.function), (), function.derivative and moved(function.derivative))
