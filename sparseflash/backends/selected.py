"""The operators of the kernels for chosen tokens, `sparseflash::token_attention` and `sparseflash::token_scores`.

Derivatives that the kernels do not have are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.refused_derivatives import refuse_functional_gradients
from sparseflash.backends.registration import call, empty_gradient, empty_kept, empty_lse, empty_out, register


def check(q: Tensor, k: Tensor, v_dim: int, choices: int) -> None:
    """Raises an error unless the kernels run here and take these tensors."""
    from sparseflash.backends.triton.selected import api  # imported late: the library must work without Triton

    api.check(q, k, v_dim, choices)


def shares_values(dim: int, v_dim: int) -> bool:
    """Whether the kernels gather a key once for its values, too, if these are its first `v_dim` columns."""
    from sparseflash.backends.triton.selected import tiles

    return tiles.shares_values(dim, v_dim)


def token_attention(
    q: Tensor, k: Tensor, v: Tensor | None, index: Tensor, v_dim: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`(out, lse)`. v: None if the first `v_dim` columns of k are the values and `shares_values`. scale: at least 0."""
    out, lse, *_ = called(torch.ops.sparseflash.token_attention, q, k, v, index, v_dim, causal, scale)
    return out, lse


def token_scores(q: Tensor, k: Tensor, index: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`(scores, tokens)`: see `sparseflash.selected_tokens.token_scores`."""
    scores, lists, _ = called(torch.ops.sparseflash.token_scores, q, k, index, causal, scale)
    return scores, torch.where(lists < k.shape[2], lists, -1)


def called(operator: Any, *arguments: Any) -> Any:
    """What an operator of these kernels returns. Derivatives that the kernels do not have are refused."""
    refuse_functional_gradients("triton")
    return call("triton", operator, arguments)


class Gradients:
    """The autograd formula of an operator that takes `q, k, v` and four more arguments; v may be None. The operator
    returns `out, lse` and further tensors for its backward.
    """

    def __init__(self, operator: str, numbers: int) -> None:
        """numbers: how many of the last arguments the backward takes."""
        self._backward, self._numbers = f"{operator}_backward", numbers

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.numbers = inputs[-self._numbers :]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*inputs[:3], *output)

    def differentiate(
        self, ctx: Any, dout: Tensor | None, dlse: Tensor | None, *others: None
    ) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 7
        q, k, v, out, *saved = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        backward = getattr(torch.ops.sparseflash, self._backward)
        dq, dk, dv = backward(dout, dlse, q, k, v, out, *saved, *ctx.numbers)
        return dq, dk, None if v is None else dv, None, None, None, None


def _attention(
    q: Tensor, k: Tensor, v: Tensor | None, index: Tensor, v_dim: int, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    from sparseflash.backends.triton.selected import api

    out, lse, chosen, kept = api.forward(q, k, v, index, v_dim, causal, scale)
    return out, lse, *chosen, kept


def _fake_attention(
    q: Tensor, k: Tensor, v: Tensor | None, index: Tensor, v_dim: int, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    lists = index.new_empty(index.shape, dtype=torch.int32)
    out = empty_out(q, k[..., :v_dim] if v is None else v)
    return out, empty_lse(q), lists, lists.new_empty(lists.shape[:3]), empty_kept(q)


def _attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, out: Tensor, lse: Tensor,
    lists: Tensor, counts: Tensor, kept: Tensor, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    from sparseflash.backends.triton.selected import gradients
    from sparseflash.backends.triton.selected.lists import Chosen

    dq, dk, dv = gradients.backward(dout, dlse, q, k, v, out, lse, Chosen(lists, counts), kept, scale)
    return dq, dk, k.new_empty(0) if dv is None else dv


def _fake_attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    return empty_gradient(q), empty_gradient(k), k.new_empty(0) if v is None else empty_gradient(v)


_gradients = Gradients("token_attention", 1)
register(
    "token_attention", "triton",
    (
        "(Tensor q, Tensor k, Tensor? v, Tensor index, int v_dim, bool causal, float scale) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)", _attention, _fake_attention,
    ),
    (
        "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor? v, Tensor out, Tensor lse, Tensor lists, "
        "Tensor counts, Tensor kept, float scale) -> (Tensor, Tensor, Tensor)",
        _attention_backward, _fake_attention_backward,
    ),
    _gradients.differentiate, _gradients.save,
)  # fmt: skip


def _scores(q: Tensor, k: Tensor, index: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    from sparseflash.backends.triton.selected import api

    scores, chosen = api.scores(q, k, index, causal, scale)
    return scores, *chosen


def _fake_scores(q: Tensor, k: Tensor, index: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    lists = index.new_empty(index.shape, dtype=torch.int32)
    scores = q.new_empty(*q.shape[:3], index.shape[3], dtype=torch.float32)
    return scores, lists, lists.new_empty(lists.shape[:3])


def _scores_backward(
    dscores: Tensor, q: Tensor, k: Tensor, lists: Tensor, counts: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    from sparseflash.backends.triton.selected import gradients
    from sparseflash.backends.triton.selected.lists import Chosen

    return gradients.scores_backward(dscores, q, k, Chosen(lists, counts), scale)


def _fake_scores_backward(dscores: Tensor, q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return empty_gradient(q), empty_gradient(k)


def _save_scores(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, *_, ctx.scale = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, k, *output[1:])


def _differentiate_scores(ctx: Any, dscores: Tensor, *others: None) -> tuple[Tensor | None, ...]:
    q, k, lists, counts = ctx.saved_tensors
    none = (lists >= k.shape[2]).repeat_interleave(q.shape[1] // k.shape[1], 1)
    dq, dk = torch.ops.sparseflash.token_scores_backward(
        dscores.masked_fill(none, 0.0), q, k, lists, counts, ctx.scale
    )  # fmt: skip
    return dq, dk, None, None, None


register(
    "token_scores", "triton",
    (
        "(Tensor q, Tensor k, Tensor index, bool causal, float scale) -> (Tensor, Tensor, Tensor)",
        _scores, _fake_scores,
    ),
    (
        "(Tensor dscores, Tensor q, Tensor k, Tensor lists, Tensor counts, float scale) -> (Tensor, Tensor)",
        _scores_backward, _fake_scores_backward,
    ),
    _differentiate_scores, _save_scores,
)  # fmt: skip
