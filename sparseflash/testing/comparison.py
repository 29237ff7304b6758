"""Compares all results of an attention with the truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.scores.change import Change, Scores, scores_of
from sparseflash.testing.definition import Attention, Changes, Inputs, by_definition, largest_score, results_of
from sparseflash.testing.sampling import Part, sampled_heads, sampled_part
from sparseflash.testing.yardstick import Error, draws_for, error_of, largest_error, live_queries, plain_dtype
from sparseflash.validation import check_mask, check_tensors

_FP32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Comparison:
    """The errors of the compared results, by name: `out`, and if they exist `lse`, `dq`, `dk` and `dv`.

    >>> print(Comparison({"out": Error(largest=1e-3, allowed=2e-3)}))
             error   allowed   ratio
    out   1.00e-03  2.00e-03    0.50
    """

    errors: dict[str, Error]

    @property
    def ratios(self) -> dict[str, float]:
        """The error of each result relative to its allowed error."""
        return {name: error.ratio for name, error in self.errors.items()}

    @property
    def worst(self) -> float:
        """The largest ratio; at most 1 is exact."""
        return max(self.ratios.values())

    @property
    def exact(self) -> bool:
        """Whether no error is larger than allowed."""
        return self.worst <= 1.0

    def __str__(self) -> str:
        rows = [f"{'':4}{'error':>10}{'allowed':>10}{'ratio':>8}"]
        for name, error in self.errors.items():
            ratio = f"{error.ratio:.2f}" if error.ratio < 1000 else f"{error.ratio:.1e}"
            rows.append(f"{name:4}{error.largest:10.2e}{error.allowed:10.2e}{ratio:>8}")
        return "\n".join(rows)


def compare_results(
    got: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    plain: Mapping[str, Tensor | float],
    *,
    magnitudes: Mapping[str, float] | None = None,
    rms: bool = False,
) -> Comparison:
    """Compares given results, by name, with the truth in fp64.

    >>> truth = {"out": torch.tensor([1.0, 2.0]).double()}
    >>> print(compare_results({"out": torch.tensor([1.0, 2.25])}, truth, {"out": 0.25}))
             error   allowed   ratio
    out   2.50e-01  5.00e-01    0.50

    Args:
        got: the results.
        truth: the true results.
        plain: results of the same computation done plainly in the same dtype, or their largest errors over several
            draws.
        magnitudes: for results that are small sums of large numbers, the size of the summands (for lse,
            `largest_score`).
        rms: judge the root-mean-square errors, too (`error_of`).
    """
    sizes = magnitudes or {}
    return Comparison(
        {
            name: error_of(result, truth[name], plain[name], magnitude=sizes.get(name, 0.0), rms=rms)
            for name, result in got.items()
        }
    )


def compare(
    function: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | None = None,
    *,
    scale: float | None = None,
    scores: Scores | Change | None = None,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    gradients: bool = True,
    heads: int | None = None,
    blocks: int | None = None,
    seed: int = 0,
    every_draw: bool = True,
) -> Comparison:
    """Compares a function of q, k and v with the definition of attention, forward and backward.

    >>> from sparseflash import attention, masks
    >>> q, k, v = (torch.randn(2, 4, 200, 32, dtype=torch.bfloat16) for _ in range(3))
    >>> mask = masks.causal(200)
    >>> found = compare(lambda q, k, v: attention(q, k, v, mask, return_lse=True), q, k, v, mask)
    >>> list(found.errors), found.exact
    (['out', 'lse', 'dq', 'dk', 'dv'], True)

    Args:
        function: `function(q, k, v)` returns out `[B, Hq, Nq, Dv]`, or `(out, lse)` with lse `[B, Hq, Nq]`.
        mask: the mask that the function applies, on q's device; None for dense attention.
        dout, dlse: the gradients of out and lse; by default drawn from a normal distribution with `seed`.
        gradients: False for a function without gradients, such as one that decodes.
        scores: the score modifications that the function applies, as `attention` takes them. The gradients of tensors
            that require grad are compared, too, as `d0`, `d1` and so on, by their place in `scores.tensors()`.
        every_draw: False to stop at the first draw that shows the function to be exact.
        heads: the number of pairs of a batch element and a key head to compare, with their query heads
            (`sampled_heads`), for long sequences.
        blocks: the number of block rows to compare, and of key blocks with all rows that see them (`sampled_part`).

    The tensors are detached and never written to. With score modifications:

    >>> from sparseflash import scores
    >>> change = scores.alibi(torch.ones(4, requires_grad=True)) + scores.softcap(5.0)
    >>> found = compare(lambda q, k, v: attention(q, k, v, mask, scores=change), q, k, v, mask, scores=change)
    >>> list(found.errors), found.exact
    (['out', 'dq', 'dk', 'dv', 'd0'], True)

    The truth is `softmax(scale * q k^T, live scores only) v` in fp64, computed for a bounded number of scores at a
    time, in time proportional to the live keys of each block row. The allowed error is twice the error of the plain
    computation in q's dtype, plus about one unit in the last place of the largest value. If it was exact by luck, as
    with few values, the largest error over several draws of shuffled inputs counts.

    With `heads` or `blocks`, other results must still be finite, and gradients of the tensors of `scores` are not
    compared.

    In half precision the gradient of a score, `weight * (dweight - delta)`, is only as exact as out:
    `delta = sum(out * dout)` is computed from the rounded out, as in FlashAttention. The error is up to
    `eps * weight * sum(|dout| * mean |v|)`, with the mean over the query's keys by weight, and a plain computation may
    be more exact where one key has nearly all the weight.

    Raises what `attention` would for q, k, v and the mask; ValueError for results of a wrong shape and for gradients
    that do not arrive at q, k or v.
    """
    if not callable(function):
        raise TypeError(f"function must be a function of q, k and v; got {type(function).__name__}.")
    check_tensors(q, k, v)
    if mask is not None:
        check_mask(mask, q, k)
    inputs = _inputs(q, k, v, dout, dlse, seed)
    changes = None
    if scores is not None:
        changes = Changes(scores_of(scores), (*q.shape[:3], k.shape[2]), mask=mask)
        changes.prepared(q.device)  # raises if they do not fit
    learned: dict[str, Tensor] = {}
    if changes is not None and gradients and heads is None and blocks is None:
        learned = changes.learned
    got, of_lse = results_of(function, inputs, learned, gradients=gradients)
    finite = {name: bool((x < math.inf if name == "lse" else x.isfinite()).all()) for name, x in got.items()}
    pairs = [None] if heads is None else sampled_heads(k.shape[0], k.shape[1], heads, seed=seed)
    chosen = [_Head.chosen(inputs, mask, pair, blocks, scale, seed, of_lse, changes) for pair in pairs]
    compared = _joined([{name: head.of(name, result) for name, result in got.items()} for head in chosen])
    truth = _joined([head.computed(torch.float64) for head in chosen])
    dtype, factor = plain_dtype(q.dtype)
    queries = live_queries(truth["out"].reshape(-1, v.shape[-1]))

    def draws() -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        for number in range(draws_for(queries, queries * k.shape[2], learned=bool(learned))):
            drawn = [head if number == 0 else head.shuffled(seed + number) for head in chosen]
            exact = truth
            if number > 0 or dtype != q.dtype:
                exact = _joined([head.computed(torch.float64, rounded=dtype) for head in drawn])
            yield _joined([head.computed(dtype) for head in drawn]), exact

    sizes = {"lse": max(largest_score(head.inputs, scale) for head in chosen)} if "lse" in got else {}
    for name, x in (("dq", inputs.k), ("dk", inputs.q)):
        # Where nothing is live, or everything is 0, no kernel has a reason to round.
        if name in got and truth["out"].any() and not truth[name].any():
            sizes[name] = max(head.size_of_differences() for head in chosen) * float(x.abs().max())

    enough = 0.0 if every_draw else 1.0
    errors = compare_with_draws(compared, truth, draws(), factor, magnitudes=sizes, enough=enough).errors
    return Comparison({n: e if finite[n] else replace(e, largest=math.inf) for n, e in errors.items()})


def compare_with_draws(
    got: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    draws: Iterable[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]],
    factor: float,
    *,
    magnitudes: Mapping[str, float] | None = None,
    enough: float = 0.0,
) -> Comparison:
    """`compare_results` with the plain errors of several draws, as for `plain_errors`, times a factor.

    `enough`: no more draws are made once the worst ratio is at most this.
    """

    def judged(plain: dict[str, float]) -> Comparison:
        allowed = {name: factor * error for name, error in plain.items()}
        return compare_results(got, truth, allowed, magnitudes=magnitudes)

    return judged(plain_errors(draws, until=lambda plain: judged(plain).worst <= enough))


def plain_errors(
    draws: Iterable[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]],
    *,
    until: Callable[[dict[str, float]], bool] | None = None,
) -> dict[str, float]:
    """The largest errors of plain results, by name, over several draws of the values.

    >>> exact = {"out": torch.tensor([1.0])}
    >>> plain_errors([({"out": torch.tensor([1.25])}, exact), ({"out": torch.tensor([1.5])}, exact)])
    {'out': 0.5}

    Args:
        draws: `(plain, truth)` of each. A draw in which the plain computation overflows is ignored; the error is
            infinite if all do.
        until: `until(errors)` is True if the draws so far suffice.
    """
    errors: dict[str, list[float]] = {}
    largest: dict[str, float] = {}
    for plain, truth in draws:
        for name, result in plain.items():
            errors.setdefault(name, []).append(largest_error(result, truth[name]))
        largest = {name: max(filter(math.isfinite, several), default=math.inf) for name, several in errors.items()}
        if until is not None and until(largest):
            break
    return largest


def assert_exact(
    function: Attention, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None = None, *, scale: float | None = None,
    scores: Scores | Change | None = None, dout: Tensor | None = None, dlse: Tensor | None = None,
    gradients: bool = True, heads: int | None = None, blocks: int | None = None, seed: int = 0,
) -> None:  # fmt: skip
    """Raises AssertionError, with a table of all errors, if `compare` finds one that is larger than allowed.

    >>> from sparseflash import attention
    >>> q, k, v = (torch.randn(1, 2, 50, 16) for _ in range(3))
    >>> assert_exact(attention, q, k, v)
    >>> assert_exact(lambda q, k, v: attention(q, k, v, scale=0.2), q, k, v)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: every error must be at most what is allowed; got
             error   allowed   ratio
    out ...

    Takes the arguments of `compare`, except `every_draw`.
    """
    found = compare(
        function, q, k, v, mask, scale=scale, scores=scores, dout=dout, dlse=dlse, gradients=gradients, heads=heads,
        blocks=blocks, seed=seed, every_draw=False,
    )  # fmt: skip
    if not found.exact:
        raise AssertionError(f"every error must be at most what is allowed; got\n{found}")


@dataclass(frozen=True)
class _Head:
    """One key head of one batch element with its query heads; all heads of the whole batch if `pair` is None."""

    inputs: Inputs
    mask: BlockMask | None
    pair: tuple[int, int] | None
    part: Part | None
    scale: float | None
    of_lse: bool
    changes: Changes | None

    @classmethod
    def chosen(
        cls, inputs: Inputs, mask: BlockMask | None, pair: tuple[int, int] | None, blocks: int | None,
        scale: float | None, seed: int, of_lse: bool, changes: Changes | None,
    ) -> _Head:  # fmt: skip
        """The head of a pair (batch element, key head), limited to `blocks` blocks unless that is None."""
        if pair is not None:
            batch, head = pair
            group = inputs.q.shape[1] // inputs.k.shape[1]
            inputs = inputs.head(batch, head)
            changes = None if changes is None else replace(changes, first=(batch, head * group))
            if mask is not None:
                queries = slice(head * group, (head + 1) * group)
                mask = mask.select(
                    batch=batch if mask.shape[0] > 1 else None, heads=queries if mask.shape[1] > 1 else None
                )
        part = None
        if blocks is not None and mask is not None:
            layout = mask.to_layout().flatten(0, 1).any(0)
            part = sampled_part(layout, mask.block_q, mask.block_k, blocks=blocks, seed=seed)
        return cls(inputs, mask, pair, part, scale, of_lse, changes)

    def shuffled(self, seed: int) -> _Head:
        return replace(self, inputs=self.inputs.shuffled(seed))

    def size_of_differences(self) -> float:
        """The size of the terms that cancel in dq and dk, but for a factor of k or q, if no query has two live keys: a
        kernel that recomputes the weights subtracts two sums of the same products, added in different orders.
        """
        scale = self.inputs.q.shape[-1] ** -0.5 if self.scale is None else self.scale
        products = largest_score(replace(self.inputs, q=self.inputs.dout, k=self.inputs.v), scale)
        return products * min(1.0, _FP32 / torch.finfo(self.inputs.q.dtype).eps)

    def of(self, name: str, result: Tensor) -> Tensor:
        if self.pair is not None:
            batch, head = self.pair
            wide = 1 if name in ("dk", "dv") else self.inputs.q.shape[1]
            result = result[batch : batch + 1, head * wide : (head + 1) * wide]
        return result if self.part is None else self.part.of(name, result)

    def computed(self, dtype: torch.dtype, rounded: torch.dtype | None = None) -> dict[str, Tensor]:
        """The compared part by the definition, computed in `dtype` from inputs first rounded to `rounded`."""
        inputs, changes = self.inputs, self.changes
        for each in (rounded, dtype):
            if each is not None:
                inputs, changes = inputs.to(each), None if changes is None else changes.to(each)
        made = by_definition(
            inputs, self.mask, scale=self.scale, of_lse=self.of_lse, part=self.part, changes=changes
        )  # fmt: skip
        return made if self.part is None else {name: self.part.of(name, result) for name, result in made.items()}


def _inputs(q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, dlse: Tensor | None, seed: int) -> Inputs:
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (*q.shape[:3], v.shape[3])

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(q.device, q.dtype)

    return Inputs(
        q.detach(), k.detach(), v.detach(),
        drawn(shape) if dout is None else dout.detach(), drawn(shape[:3]) if dlse is None else dlse.detach(),
    )  # fmt: skip


def _joined(heads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([head[name].reshape(-1) for head in heads]) for name in heads[0]}
