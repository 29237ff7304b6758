"""The comparison: all results of an attention, each against the truth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import checked_mask
from sparseflash.testing.definition import Attention, Inputs, by_definition, largest_score, results_of
from sparseflash.testing.sampling import Part, sampled_heads, sampled_part
from sparseflash.testing.yardstick import Error, draws_for, error_of, largest_error, plain_dtype


@dataclass(frozen=True)
class Comparison:
    """The errors of results by name: `out`, `lse`, `dq`, `dk`, `dv`, those that there are. `print` shows a table."""

    errors: dict[str, Error]

    @property
    def ratios(self) -> dict[str, float]:
        """The error of each in units of what is allowed."""
        return {name: error.ratio for name, error in self.errors.items()}

    @property
    def worst(self) -> float:
        """The largest of the ratios; at most 1 is exact."""
        return max(self.ratios.values())

    @property
    def exact(self) -> bool:
        """Whether no error is above what is allowed."""
        return self.worst <= 1.0

    def __str__(self) -> str:
        rows = [f"{'':4}{'error':>10}{'allowed':>10}{'ratio':>8}"]
        for name, error in self.errors.items():
            rows.append(f"{name:4}{error.largest:10.2e}{error.allowed:10.2e}{error.ratio:8.2f}")
        return "\n".join(rows)


def compare_results(
    got: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    plain: Mapping[str, Tensor | float],
    *,
    magnitudes: Mapping[str, float] | None = None,
    rms: bool = False,
) -> Comparison:
    """Judges given results, by name, against the same names of `truth`, in fp64, and of `plain`.

    `plain`: results of the same computation done plainly in the same dtype, or their largest errors over several draws;
    `magnitudes`: of results that are small sums of large numbers, the size of those (of lse, `largest_score`); `rms`:
    the root-mean-square errors are judged, too. See `error_of`.

    >>> truth = {"out": torch.tensor([1.0, 2.0]).double()}
    >>> print(compare_results({"out": torch.tensor([1.0, 2.25])}, truth, {"out": 0.25}))
             error   allowed   ratio
    out   2.50e-01  5.00e-01    0.50
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
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    heads: int | None = None,
    blocks: int | None = None,
    seed: int = 0,
) -> Comparison:
    """Compares a function of q, k and v with attention by its definition, forward and backward.

    The truth is `softmax(scale * q k^T, live scores of the mask only) v` in fp64, computed a bounded number of scores
    at a time, in time that goes with the live keys of each block row. Its plain computation in q's dtype is the
    yardstick: an error may be twice as large, plus about one unit in the last place of the largest value. Where there
    are few values the plain error is that of several draws, of the same numbers in other places: a plain result is
    sometimes right to the last bit.

    `function(q, k, v)` returns out `[B, Hq, Nq, Dv]`, or `(out, lse)` with lse `[B, Hq, Nq]`; gradients are compared if
    out has any. `mask`: what it computes under, `None` for dense attention, on q's device. `dout`, `dlse`: the
    gradients of out and lse, drawn normally by default, from `seed`. The tensors are detached, and never written to.

    Of long sequences `heads` compares so many pairs of batch element and head of k and v, with their query heads, and
    `blocks` so many block rows, and key blocks with all rows that see one: `sampled_heads`, `sampled_part`. What is not
    compared must be finite nevertheless.

    Raises ValueError for a mask of other lengths and for results of other shapes.

    >>> from sparseflash import attention, masks
    >>> q, k, v = (torch.randn(2, 4, 200, 32, dtype=torch.bfloat16) for _ in range(3))
    >>> mask = masks.causal(200)
    >>> found = compare(lambda q, k, v: attention(q, k, v, mask, return_lse=True), q, k, v, mask)
    >>> list(found.errors), found.exact
    (['out', 'lse', 'dq', 'dk', 'dv'], True)
    """
    if mask is not None:
        mask = checked_mask(mask)
        if (mask.q_len, mask.k_len) != (q.shape[2], k.shape[2]):
            raise ValueError(
                f"mask must be for the lengths of q and k, {q.shape[2]} and {k.shape[2]}; it is for {mask.q_len} and "
                f"{mask.k_len}."
            )
    inputs = _inputs(q, k, v, dout, dlse, seed)
    got, of_lse = results_of(function, inputs)
    finite = {name: bool((x < math.inf if name == "lse" else x.isfinite()).all()) for name, x in got.items()}
    pairs = [None] if heads is None else sampled_heads(k.shape[0], k.shape[1], heads, seed=seed)
    chosen = [_Head.chosen(inputs, mask, pair, blocks, scale, seed, of_lse) for pair in pairs]
    compared = _joined([{name: head.of(name, result) for name, result in got.items()} for head in chosen])
    truth = _joined([head.computed(torch.float64) for head in chosen])
    dtype, factor = plain_dtype(q.dtype)
    queries = sum(head.inputs.q[..., 0].numel() for head in chosen)

    def draws() -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        for number in range(draws_for(queries, queries * k.shape[2])):
            drawn = [head if number == 0 else head.shuffled(seed + number) for head in chosen]
            exact = truth
            if number > 0 or dtype != q.dtype:
                exact = _joined([head.computed(torch.float64, rounded=dtype) for head in drawn])
            yield _joined([head.computed(dtype) for head in drawn]), exact

    plain = {name: factor * error for name, error in plain_errors(draws()).items()}
    sizes = {"lse": max(largest_score(head.inputs, scale) for head in chosen)} if "lse" in got else {}
    errors = compare_results(compared, truth, plain, magnitudes=sizes).errors
    return Comparison({n: e if finite[n] else replace(e, largest=math.inf) for n, e in errors.items()})


def plain_errors(draws: Iterable[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]) -> dict[str, float]:
    """The largest errors of plain results, by name, over several draws of the values: `(plain, truth)` of each.

    Of those that are finite: a draw in which the plain computation overflows is no yardstick.
    """
    errors: dict[str, list[float]] = {}
    for plain, truth in draws:
        for name, result in plain.items():
            errors.setdefault(name, []).append(largest_error(result, truth[name]))
    return {name: max(filter(math.isfinite, several), default=math.inf) for name, several in errors.items()}


def assert_exact(
    function: Attention, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None = None, *, scale: float | None = None,
    dout: Tensor | None = None, dlse: Tensor | None = None, heads: int | None = None, blocks: int | None = None,
    seed: int = 0,
) -> None:  # fmt: skip
    """Raises AssertionError with a table of all errors where `compare` finds one above what is allowed.

    >>> from sparseflash import attention
    >>> q, k, v = (torch.randn(1, 2, 50, 16) for _ in range(3))
    >>> assert_exact(attention, q, k, v)
    >>> assert_exact(lambda q, k, v: attention(q, k, v, scale=0.2), q, k, v)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: every error must be at most what is allowed; got
             error   allowed   ratio
    out ...
    """
    found = compare(function, q, k, v, mask, scale=scale, dout=dout, dlse=dlse, heads=heads, blocks=blocks, seed=seed)
    if not found.exact:
        raise AssertionError(f"every error must be at most what is allowed; got\n{found}")


@dataclass(frozen=True)
class _Head:
    """One head of k and v with its query heads, or all heads of all batch elements, where `pair` is None."""

    inputs: Inputs
    mask: BlockMask | None
    pair: tuple[int, int] | None
    part: Part | None
    scale: float | None
    of_lse: bool

    @classmethod
    def chosen(
        cls, inputs: Inputs, mask: BlockMask | None, pair: tuple[int, int] | None, blocks: int | None,
        scale: float | None, seed: int, of_lse: bool,
    ) -> _Head:  # fmt: skip
        """The head of a pair (batch element, head of k and v), and of a long mask so many blocks."""
        if pair is not None:
            batch, head = pair
            group = inputs.q.shape[1] // inputs.k.shape[1]
            inputs = inputs.head(batch, head)
            if mask is not None:
                queries = slice(head * group, (head + 1) * group)
                mask = mask.select(
                    batch=batch if mask.shape[0] > 1 else None, heads=queries if mask.shape[1] > 1 else None
                )
        part = None
        if blocks is not None and mask is not None:
            layout = mask.to_layout().flatten(0, 1).any(0)
            part = sampled_part(layout, mask.block_q, mask.block_k, blocks=blocks, seed=seed)
        return cls(inputs, mask, pair, part, scale, of_lse)

    def shuffled(self, seed: int) -> _Head:
        return replace(self, inputs=self.inputs.shuffled(seed))

    def of(self, name: str, result: Tensor) -> Tensor:
        """What is compared of a result of all heads."""
        if self.pair is not None:
            batch, head = self.pair
            wide = 1 if name in ("dk", "dv") else self.inputs.q.shape[1]
            result = result[batch : batch + 1, head * wide : (head + 1) * wide]
        return result if self.part is None else self.part.of(name, result)

    def computed(self, dtype: torch.dtype, rounded: torch.dtype | None = None) -> dict[str, Tensor]:
        """The compared part by the definition, in a dtype; of inputs that are rounded to another one before."""
        inputs = self.inputs if rounded is None else self.inputs.to(rounded)
        made = by_definition(inputs.to(dtype), self.mask, scale=self.scale, of_lse=self.of_lse, part=self.part)
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
    """All numbers of each result; heads of other patterns have other parts."""
    return {name: torch.cat([head[name].reshape(-1) for head in heads]) for name in heads[0]}
