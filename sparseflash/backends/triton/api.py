"""The entry point of the Triton backend: checks its own requirements, plans and launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparseflash.backends.direct import is_plain_call
from sparseflash.backends.operators import Operator
from sparseflash.backends.problem import Problem
from sparseflash.backends.registration import empty_gradient, empty_kept, empty_lse, empty_out
from sparseflash.backends.saved import Saved
from sparseflash.backends.triton.availability import INTERPRETED
from sparseflash.backends.triton.device import check_runs
from sparseflash.backends.triton.dispatch import Decision
from sparseflash.backends.triton.family import KernelChoice
from sparseflash.backends.triton.launch.launches import like
from sparseflash.backends.triton.prepared_call import PreparedCall, key_of, prepared, setting_of
from sparseflash.limits import check_near, check_tokens
from sparseflash.scores.change import Scores

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores | None
) -> tuple[Tensor, Tensor, Tensor]:
    check(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return empty_out(q, v).zero_(), empty_lse(q).fill_(-torch.inf), empty_kept(q)
    run = prepared(q, k, v, problem, changes).prepare_forward(q, k, v, changes)
    out, lse, kept = run(q, k, v, problem.lengths, problem.dropout, changes)
    return out, lse, empty_kept(q) if kept is None else kept


def _backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem, changes: Scores | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    if saved.q.numel() == 0 or saved.k.numel() == 0:
        tensors = [] if changes is None else changes.tensors()
        learned = [torch.zeros_like(x) if wants else None for x, wants in zip(tensors, wanted, strict=True)]
        dq, dk, dv = (empty_gradient(x).zero_() for x in (saved.q, saved.k, saved.v))
        return dq, dk, dv, learned
    call = prepared(*saved[:3], problem, changes)
    if changes is None:
        return *call.backward(dout, dlse, saved, problem.lengths, problem.dropout), []
    return call.scored_backward(dout, dlse, saved, problem.lengths, problem.dropout, changes, wanted)


attention = Operator("triton", _forward, _backward, empty_kept)


def check_gradients(q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores | None = None) -> None:
    """`PreparedCall.check_gradients` of a plain call, before its forward."""
    if not (problem.kernels and torch.is_grad_enabled() and q.numel() and k.numel()):
        return
    tensors = () if changes is None else changes.tensors()
    if any([x.requires_grad for x in (q, k, v, *tensors)]) and is_plain_call(q, k, v, *tensors):
        check(q, k, v)
        prepared(q, k, v, problem, changes).check_gradients(q, k, v, changes)


def choices(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, capability: tuple[int, int], changes: Scores | None = None
) -> tuple[tuple[Decision, Decision], list[KernelChoice], str | None]:
    """The kernels that a GPU of this capability would run for a forward and a backward.

    The third value is a note on the installed Triton, or None. Raises ValueError if the problem requests kernels that
    cannot serve a pass that is needed.
    """
    device = q.device if q.device.type != "meta" else torch.device("cpu")  # a plan needs real arrays
    setting = setting_of(q, k, problem, capability, device)
    wanted = [] if changes is None else [x.requires_grad for x in changes.tensors()]
    key = *key_of(setting, problem, q, k, v, changes), *wanted
    call = PreparedCall(setting, key, problem, changes)
    asked, first = call.decision(q, v, changes, backward=False)
    _, second = call.decision(q, v, changes, wanted, backward=True)
    forward, _ = first.serving().passes()
    numbers = problem.scale, problem.dropped
    found = forward(setting, (q.device, key), q, k, v, *numbers, changes=changes).choices()
    if second.family is not None or torch.is_grad_enabled():
        _, backward = second.serving().passes()
        out = empty_out(like(q), like(v))
        made = backward(
            setting, (q.device, "out", key), q, k, v, out, out, *numbers, dlse=False, changes=changes, wanted=wanted
        )
        found = [*found, *made.choices()]
    notes = [each.family.note(asked) for each in (first, second) if each.family is not None]
    return (first, second), found, next((note for note in notes if note is not None), None)


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises TypeError, ValueError or RuntimeError unless the kernels can read these tensors here."""
    check_layout(q, k, v)
    check_runs(q, INTERPRETED)


def check_layout(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises TypeError or ValueError unless kernels on some GPU can read tensors of this layout."""
    if q.dtype not in _DTYPES:
        raise TypeError(
            f"q must be fp16, bf16 or fp32 for the triton backend; got {q.dtype}. backend='blockwise' takes fp64, too."
        )
    for name, dim in (("D", q.shape[-1]), ("Dv", v.shape[-1])):
        if not 16 <= dim <= 256:
            raise ValueError(
                f"head dims must be from 16 to 256 for the triton backend; got {name} = {dim}. backend='blockwise' "
                "takes others, too."
            )
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_near(x, name)
        if x.shape[2]:
            check_tokens(x.shape[2], f"the length of {name}")
