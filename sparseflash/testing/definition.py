"""Attention by its definition, a few rows at a time: the truth in fp64, the plain computation in other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from sparseflash.backends import reference
from sparseflash.blockmask import BlockMask
from sparseflash.scores.change import Place, Scores, Sizes
from sparseflash.testing.sampling import Part

NAMES = ("out", "lse", "dq", "dk", "dv")
SCORES_AT_ONCE = 2**25  # 256 MiB in fp64, several times that during an operation

Attention = Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Inputs:
    """The inputs of attention and of its backward.

    >>> q, k, v = (torch.randn(1, 2, 10, 4) for _ in range(3))
    >>> Inputs(q, k, v, dout=torch.ones(1, 2, 10, 4), dlse=torch.zeros(1, 2, 10)).head(0, 1).q.shape
    torch.Size([1, 1, 10, 4])

        q     [B, Hq, Nq, D]
        k     [B, Hkv, Nk, D]
        v     [B, Hkv, Nk, Dv]
        dout  [B, Hq, Nq, Dv]
        dlse  [B, Hq, Nq]
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(x.detach().to(dtype) for x in self._tensors()))

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x.detach().clone().requires_grad_() for x in (self.q, self.k, self.v))
        return q, k, v

    def head(self, batch: int, kv_head: int) -> Inputs:
        """The inputs of one key head of one batch element, with its group of query heads."""
        group = self.q.shape[1] // self.k.shape[1]
        queries, key = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
        q, k, v, dout, dlse = (x[batch : batch + 1] for x in self._tensors())
        return Inputs(q[:, queries], k[:, key], v[:, key], dout[:, queries], dlse[:, queries])

    def shuffled(self, seed: int) -> Inputs:
        """The same values in other places: another draw from the same distribution."""
        generator = torch.Generator("cpu").manual_seed(seed)
        return Inputs(
            *(
                x.reshape(-1)[torch.randperm(x.numel(), generator=generator, device="cpu").to(x.device)].view(x.shape)
                for x in self._tensors()
            )
        )

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.dout, self.dlse


@dataclass(frozen=True)
class Changes:
    """Score modifications, for the definition.

    >>> from sparseflash import scores
    >>> changes = Changes(scores.alibi(torch.ones(2, requires_grad=True)) + scores.softcap(5.0), (1, 2, 10, 10))
    >>> list(changes.learned)
    ['d0']

    `sizes`: B, Hq, Nq and Nk of the whole attention; `first`: the batch element and the query head that the inputs
    begin with; `mask`: of the whole attention.
    """

    scores: Scores
    sizes: tuple[int, int, int, int]
    first: tuple[int, int] = (0, 0)
    mask: BlockMask | None = None

    @property
    def learned(self) -> dict[str, Tensor]:
        return {f"d{number}": x for number, x in enumerate(self.scores.tensors()) if x.requires_grad}

    def to(self, dtype: torch.dtype) -> Changes:
        """The tensors for a computation in that dtype: only for fp64 in another precision than their own."""
        wide = dtype == torch.float64

        def cast(x: Tensor) -> Tensor:
            changed = x.is_floating_point() and (wide or x.dtype == torch.float64)
            made = x.detach().to(torch.float64 if wide else torch.float32) if changed else x.detach()
            return made.clone().requires_grad_(x.requires_grad)

        return replace(self, scores=self.scores.with_tensors([cast(x) for x in self.scores.tensors()]))

    def prepared(self, device: torch.device) -> Scores:
        return self.scores.prepared(Sizes(*self.sizes, device, self.mask))

    def place(self, shape: Sequence[int], rows: slice, keys: Tensor) -> Place:
        batch, head = (torch.arange(n, device=keys.device) + first for n, first in zip(shape, self.first))
        query = torch.arange(rows.start, rows.stop, device=keys.device)
        shift = self.sizes[3] - self.sizes[2]
        return Place(batch.view(-1, 1, 1, 1), head.view(-1, 1, 1), query.view(-1, 1), keys, shift)


def results_of(
    function: Attention, inputs: Inputs, learned: dict[str, Tensor] | None = None, *, gradients: bool = True
) -> tuple[dict[str, Tensor], bool]:
    """The results of a function of q, k and v: out, lse if it returns one, and dq, dk, dv unless `gradients` is False.

    >>> from sparseflash import attention
    >>> q, k, v = (torch.randn(1, 2, 10, 4) for _ in range(3))
    >>> found, of_lse = results_of(attention, Inputs(q, k, v, dout=torch.ones(1, 2, 10, 4), dlse=torch.zeros(1, 2, 10)))
    >>> list(found), of_lse
    (['out', 'dq', 'dk', 'dv'], False)

    The second value says whether lse requires grad; then the gradients are of out and lse together. `learned`: further
    tensors that the function reads, by the names of their gradients.

    Raises ValueError for results of a wrong shape, and for gradients that the function cuts off.
    """
    learned = learned or {}
    leaves = inputs.leaves()
    with torch.enable_grad():
        returned = function(*leaves)
    out, lse = returned if isinstance(returned, tuple) else (returned, None)
    shape = (*inputs.q.shape[:3], inputs.v.shape[3])
    if not isinstance(out, Tensor) or out.shape != shape:
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"the function must return out {list(shape)}, or out and lse; got {got}.")
    if lse is not None and (not isinstance(lse, Tensor) or lse.shape != shape[:3]):
        got = list(lse.shape) if isinstance(lse, Tensor) else type(lse).__name__
        raise ValueError(f"the function must return lse {list(shape[:3])} beside out; got {got}.")
    found = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    of_lse = lse is not None and lse.requires_grad
    if not gradients:
        return found, of_lse
    if not out.requires_grad:
        raise ValueError(
            "the function must return an out that requires grad, or its gradients cannot be compared; got one that was "
            "detached, or computed under torch.no_grad(). To compare what it returns alone: gradients=False."
        )
    asked, given = [out], [inputs.dout.to(out.dtype)]
    if lse is not None and of_lse:
        asked, given = [out, lse], [*given, inputs.dlse.to(lse.dtype)]
    arrived = torch.autograd.grad(asked, (*leaves, *learned.values()), given, allow_unused=True)
    for name, gradient in zip(("dq", "dk", "dv"), arrived):
        if gradient is None:
            raise ValueError(
                f"the function must return an out that depends on q, k and v; got one without {name}: was {name[1:]} "
                "detached, or another tensor used in its place?"
            )
        found[name] = gradient
    for (name, x), gradient in zip(learned.items(), arrived[3:]):
        if gradient is None:
            raise ValueError(
                f"scores must be the modifications that the function applies, with the same tensors; got "
                f"{list(x.shape)} as the tensor of {name}, but the results do not depend on it."
            )
        found[name] = gradient
    return found, of_lse


def by_definition(
    inputs: Inputs, mask: BlockMask | None, *, scale: float | None = None, of_lse: bool = True,
    part: Part | None = None, changes: Changes | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """out, lse, dq, dk and dv of `softmax(scale * q k^T, live scores only) v`, computed in the dtype of the inputs.

    >>> q, k, v = (torch.randn(1, 2, 10, 4) for _ in range(3))
    >>> inputs = Inputs(q, k, v, dout=torch.ones(1, 2, 10, 4), dlse=torch.zeros(1, 2, 10))
    >>> list(by_definition(inputs, None))
    ['out', 'lse', 'dq', 'dk', 'dv']

        of_lse: whether the gradients are of out and lse, or of out alone.
        part: the block rows of a long sequence to compute; the results of other rows are 0, and dk and dv lack their
            contributions.
        changes: score modifications; the gradients of their tensors are further results.

    Computes a bounded number of scores at a time, and only for keys that are live in those rows. Gradients of k and v
    are summed over the rows in fp64.
    """
    q, k, v, dout, dlse = (x.detach() for x in inputs._tensors())
    scale = 1.0 / sqrt(q.shape[-1]) if scale is None else scale
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    out, lses, dq = torch.zeros_like(dout), torch.zeros_like(dlse, dtype=lse_dtype), torch.zeros_like(q)
    dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (k, v))
    prepared = None if changes is None else changes.prepared(q.device)
    learned = {} if changes is None else changes.learned
    sums = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in learned.items()}
    for rows in _row_ranges(inputs, mask, part):
        live: Tensor | None = None
        keys: Tensor | slice = slice(None)
        if mask is not None:
            live = mask.crop(q=(rows.start, rows.stop)).to_dense()  # [B or 1, Hq or 1, R, Nk]
            seen = live.flatten(0, 2).any(0)
            if not bool(seen.all()) and bool(seen.any()):
                keys = seen.nonzero()[:, 0]
                live = live[..., keys]
        leaves = [x.clone().requires_grad_() for x in (q[:, :, rows], k[:, :, keys], v[:, :, keys])]
        with torch.enable_grad():
            at = None
            if changes is not None:
                at = changes.place(q.shape, rows, torch.arange(k.shape[2], device=k.device)[keys])
            results = reference.attention_of_live(
                leaves[0], leaves[1], leaves[2], live, scale, changes=prepared, at=at
            )  # fmt: skip
        gradients = torch.autograd.grad(
            results[: 1 + of_lse], [*leaves, *learned.values()],
            [dout[:, :, rows], dlse[:, :, rows].to(lse_dtype)][: 1 + of_lse],
            retain_graph=bool(learned), allow_unused=bool(learned),
        )  # fmt: skip
        out[:, :, rows], lses[:, :, rows], dq[:, :, rows] = results[0].detach(), results[1].detach(), gradients[0]
        dk[:, :, keys] += gradients[1]
        dv[:, :, keys] += gradients[2]
        for name, gradient in zip(sums, gradients[3:]):
            sums[name] += 0 if gradient is None else gradient
    found = dict(zip(NAMES, (out, lses, dq, dk.to(k.dtype), dv.to(v.dtype)), strict=True))
    return found | {name: total.to(learned[name].dtype) for name, total in sums.items()}


def largest_score(inputs: Inputs, scale: float | None = None) -> float:
    """The largest sum of absolute products behind any score, the size of the numbers that lse is computed from.

    >>> x = torch.ones(1, 1, 3, 4)
    >>> largest_score(Inputs(x, x, x, x, x[..., 0]))
    2.0
    """
    q, k = inputs.q.detach().double().abs(), inputs.k.detach().double().abs()
    k = k.repeat_interleave(inputs.q.shape[1] // inputs.k.shape[1], 1)
    largest = 0.0
    for some in q.split(_rows_at_once(inputs), dim=2):
        largest = max(largest, float((some @ k.mT).max()) if k.shape[2] else 0.0)
    return largest * (1.0 / sqrt(q.shape[-1]) if scale is None else abs(scale))


def _row_ranges(inputs: Inputs, mask: BlockMask | None, part: Part | None) -> Iterator[slice]:
    """The rows to compute at a time, so that their scores fit in memory: whole blocks, so that crops need no shift."""
    q_len, block = inputs.q.shape[2], 128 if mask is None else mask.block_q
    step = max(1, _rows_at_once(inputs) // block)
    blocks = range(-(-q_len // block)) if part is None else part.rows.nonzero()[:, 0].tolist()
    start = 0
    while start < len(blocks):
        stop = start + 1
        while stop < len(blocks) and stop - start < step and blocks[stop] == blocks[stop - 1] + 1:
            stop += 1
        yield slice(blocks[start] * block, min((blocks[stop - 1] + 1) * block, q_len))
        start = stop


def _rows_at_once(inputs: Inputs) -> int:
    return max(1, SCORES_AT_ONCE // (inputs.q.shape[0] * inputs.q.shape[1] * max(1, inputs.k.shape[2])))
