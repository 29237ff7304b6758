"""Some of a rank's queries attend to other keys than the rest: they are taken apart, and their results put in place."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


def taken_apart(q: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`(q[:, :, rows], q)`, for two attentions; the second one gives these rows no gradient."""
    some, whole = _Take.apply(q, rows)  # type: ignore[no-untyped-call]
    return some, whole


def put_in_place(some: tuple[Tensor, Tensor], whole: tuple[Tensor, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of all queries: `some` for these rows, which have no live key in `whole`, and `whole` elsewhere."""
    out, lse = _Put.apply(rows, *some, *whole)  # type: ignore[no-untyped-call]
    return out, lse


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        return q.index_select(2, rows), q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        some, whole = gradients
        (rows,) = ctx.saved_tensors
        return whole.index_copy_(2, rows, some), None


class _Put(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, some_out: Tensor, some_lse: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        # Written in place, though attention has saved them: its backward does not read rows without a live key. `data`
        # tells PyTorch so.
        return out.data.index_copy_(2, rows, some_out), lse.data.index_copy_(2, rows, some_lse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor, Tensor, Tensor]:
        dout, dlse = gradients
        (rows,) = ctx.saved_tensors
        return None, dout.index_select(2, rows), dlse.index_select(2, rows), dout, dlse
