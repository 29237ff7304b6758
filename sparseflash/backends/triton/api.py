"""The entry point of the Triton backend: checks its own requirements, plans and launches. Importing it needs Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.direct import as_recorded, is_plain_call
from sparseflash.backends.problem import Problem
from sparseflash.backends.registration import Operator, empty_gradient, empty_lse, empty_out
from sparseflash.backends.saved import Saved
from sparseflash.backends.scored import ScoredOperator
from sparseflash.backends.triton import device as gpu
from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.availability import check_runs
from sparseflash.backends.triton.compile_ahead import compile_side_by_side
from sparseflash.backends.triton.cuda_graphs import refuse_to_record
from sparseflash.backends.triton.dispatch import Decision, decide, has_short_tiles
from sparseflash.backends.triton.family import BackwardPass, ForwardPass, KernelChoice, Request, Setting
from sparseflash.backends.triton.launch.examples import like
from sparseflash.backends.triton.notice import warn_if_slower
from sparseflash.backends.triton.portable.passes import empty_kept
from sparseflash.backends.triton.schedule.plan import Plan, dense_plan, plan_of
from sparseflash.blockmask.cache import BoundedDict
from sparseflash.limits import check_near, check_tokens
from sparseflash.scores.change import Scores

_SHORT = 64  # without a mask, tiles have at most this many tokens if neither q nor k is longer
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    check(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return empty_out(q, v).zero_(), empty_lse(q).fill_(-torch.inf), empty_kept(q)
    run: Any = forward_pass(q, k, v, problem, changes)
    more = () if changes is None else (changes,)
    out, lse, kept = run(q, k, v, problem.lengths, problem.dropout, *more)
    return out, lse, empty_kept(q) if kept is None else kept


def _backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if saved.q.numel() == 0 or saved.k.numel() == 0:
        return _zeros(saved)
    dout, dlse, saved = as_kernels_read(dout, dlse, saved)
    run = backward_pass(*saved[:4], dout, problem, dlse=dlse is not None)
    return run(dout, dlse, saved, problem.lengths, problem.dropout)


def _zeros(saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(empty_gradient(x).zero_() for x in saved[:3])  # type: ignore[return-value]


attention = Operator("triton", _forward, _backward, empty_kept)


def _scored_backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, changes: Scores, wanted: Sequence[bool], problem: Problem
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    if saved.q.numel() == 0 or saved.k.numel() == 0:
        learned = [torch.zeros_like(x) if wants else None for x, wants in zip(changes.tensors(), wanted, strict=True)]
        return *_zeros(saved), learned
    dout, dlse, saved = as_kernels_read(dout, dlse, saved)
    run: Any = backward_pass(*saved[:4], dout, problem, dlse=dlse is not None, changes=changes, wanted=wanted)
    gradients, learned = run.with_learned(dout, dlse, saved, problem.lengths, problem.dropout, changes)
    return *gradients, learned


scored_attention = ScoredOperator("triton", _forward, _scored_backward, empty_kept)


def as_kernels_read(
    dout: Tensor, dlse: Tensor | None, saved: Saved
) -> tuple[Tensor, Tensor | None, Saved]:  # fmt: skip
    """Copies incoming gradients and saved tensors where kernels cannot read their layout."""
    if dout.stride(-1) != 1:  # sum() sends back one number, expanded
        dout = dout.contiguous()
    dlse = None if dlse is None else aligned_start(dlse.contiguous())
    out, lse, kept = aligned_start(saved.out), aligned_start(saved.lse.contiguous()), saved.kept
    if kept is not None:
        kept = aligned_start(kept.contiguous())
    if out is not saved.out or lse is not saved.lse or kept is not saved.kept:  # hooks may have changed them
        saved = saved._replace(out=out, lse=lse, kept=kept)
    return dout, dlse, saved


def forward_pass(q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores | None = None) -> ForwardPass:
    """The forward for tensors of this layout, cached with the plan."""
    setting, request, decision = _decided(q, k, v, problem, changes, backward=False)
    family = decision.serving()
    key = ("forward", family.name, *_key(setting, problem, q, k, v), *key_of_changes(changes))
    made: ForwardPass | None = setting.plan.launches.get(key)
    if made is None:
        _refuse(setting.plan)
        warn_if_slower(request, decision)
        forward, _ = family.passes()
        more = {} if changes is None else {"changes": changes}
        made = forward(setting, (q.device, key), q, k, v, problem.scale, problem.dropped, **more)
        setting.plan.launches.put(key, made)
        launches = made.launches()
        # Inside of an autograd.Function grad mode is off, so requires_grad of q, k and v shows whether a backward will
        # follow: `as_recorded` detaches them if no graph is recorded.
        follows = any([x.requires_grad for x in (q, k, v)])
        is_recorded = follows or torch.is_grad_enabled()
        wanted = [] if changes is None else [is_recorded and x.requires_grad for x in changes.tensors()]
        if (follows or any(wanted)) and decide(
            Request.of(setting, q, v, changes, wanted, backward=True), problem.kernels
        ).family is not None:  # fmt: skip
            out = empty_out(like(q), like(v))
            with suppress(ValueError):  # the backward raises when it is called
                launches += backward_pass(
                    q, k, v, out, out, problem, dlse=False, changes=changes, wanted=wanted, compiles=False
                ).launches()  # fmt: skip
        compile_side_by_side(launches)
    return made


def backward_pass(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, problem: Problem, *, dlse: bool,
    changes: Scores | None = None, wanted: Sequence[bool] = (), compiles: bool = True,
) -> BackwardPass:  # fmt: skip
    """The backward for tensors of this layout, cached with the plan.

    wanted: which tensors of the score modifications need a gradient. compiles: start compiling the kernels here;
    otherwise the caller does.
    """
    setting, request, decision = _decided(q, k, v, problem, changes, wanted, backward=True)
    family = decision.serving()
    key = (
        "backward", family.name, dlse, *_key(setting, problem, q, k, v, out, dout), *key_of_changes(changes), *wanted,
    )  # fmt: skip
    made: BackwardPass | None = setting.plan.launches.get(key)
    if made is None:
        _refuse(setting.plan)
        warn_if_slower(request, decision)
        for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
            check_near(x, name)  # saved-tensor hooks may have changed the layout
        _, backward = family.passes()
        more: dict[str, Any] = {} if changes is None else {"changes": changes, "wanted": wanted}
        made = backward(
            setting, (q.device, key), q, k, v, out, dout, problem.scale, problem.dropped, dlse=dlse, **more
        )  # fmt: skip
        setting.plan.launches.put(key, made)
        if compiles:
            compile_side_by_side(made.launches())
    return made


def _decided(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores | None, wanted: Sequence[bool] = (), *,
    backward: bool,
) -> tuple[Setting, Request, Decision]:  # fmt: skip
    setting = setting_of(q, k, problem, gpu.capability_of(q.device))
    request = Request.of(setting, q, v, changes, wanted, backward=backward)
    return setting, request, decide(request, problem.kernels)


def check_gradients(q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores | None = None) -> None:
    """Raises ValueError if a plain call requests kernels that cannot compute a gradient it needs. Otherwise the error
    would come only in the backward.
    """
    if not (problem.kernels and torch.is_grad_enabled() and q.numel() and k.numel()):
        return
    tensors = () if changes is None else changes.tensors()
    wanted = [x.requires_grad for x in tensors]
    if any([x.requires_grad for x in (q, k, v)] + wanted) and is_plain_call(q, k, v, *tensors):
        check(q, k, v)
        _decided(q, k, v, problem, changes, wanted, backward=True)[2].serving()


def insisted_gradients(problem: Problem, changes: Scores) -> list[bool]:
    """For a call that requests certain kernels, which tensors of the score modifications need a gradient; else []."""
    if problem.kernels and torch.is_grad_enabled():
        return [x.requires_grad for x in changes.tensors()]
    return []


def key_of_changes(changes: Scores | None) -> tuple[Any, ...]:
    """The part of a launch's key about score modifications: everything but the values of their tensors."""
    if changes is None:
        return ()
    function = changes.find("function")
    return (  # lists are faster than generators here
        None if function is None else function.identity,
        *[(each.kind, each.numbers()) for each in changes.changes],
        *[(x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in changes.tensors()],
    )


def choices(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, capability: tuple[int, int], changes: Scores | None = None
) -> tuple[tuple[Decision, Decision], list[KernelChoice], str | None]:
    """The kernels that a GPU of this capability would run for a forward and a backward.

    The third value is a note on the installed Triton, or None. Raises ValueError if the problem requests kernels that
    cannot serve a pass; a backward that is not needed is not checked.
    """
    device = q.device if q.device.type != "meta" else torch.device("cpu")  # a plan needs real arrays
    setting = setting_of(q, k, problem, capability, device)
    wanted = [] if changes is None else [x.requires_grad for x in changes.tensors()]
    asked = Request.of(setting, q, v, changes, backward=False)
    first = decide(asked, problem.kernels)
    second = decide(Request.of(setting, q, v, changes, wanted, backward=True), problem.kernels)
    forward, _ = first.serving().passes()
    key = *_key(setting, problem, q, k, v), *key_of_changes(changes), *wanted
    numbers = problem.scale, problem.dropped
    more: dict[str, Any] = {} if changes is None else {"changes": changes}
    found = forward(setting, (q.device, key), q, k, v, *numbers, **more).choices()
    if second.family is not None or torch.is_grad_enabled():
        _, backward = second.serving().passes()
        out = empty_out(like(q), like(v))
        more |= {} if changes is None else {"wanted": wanted}
        made = backward(setting, (q.device, "out", key), q, k, v, out, out, *numbers, dlse=False, **more)
        found = [*found, *made.choices()]
    notes = [each.family.note(asked) for each in (first, second) if each.family is not None]
    return (first, second), found, next((note for note in notes if note is not None), None)


def setting_of(
    q: Tensor, k: Tensor, problem: Problem, capability: tuple[int, int], device: torch.device | None = None
) -> Setting:
    """The plan of a problem, and everything else that determines its kernels.

    device: for the plan of dense attention; q's device by default.
    """
    heads, tokens = (q.shape[0], q.shape[1]), (q.shape[2], k.shape[2])
    block = problem.block_q, problem.block_k
    if problem.indptr is None:
        # Kernels that need tiles of 128 are worth it if either side is long.
        if max(tokens) <= _SHORT and has_short_tiles(problem.kernels):
            block = min(block[0], _SHORT), min(block[1], _SHORT)
        plan = dense_plan(heads, k.shape[1], tokens, block, device or q.device)
    else:
        plan = plan_of(problem, heads, k.shape[1], tokens)
    tf32 = q.dtype == torch.float32 and gpu.multiplies_in_tf32()
    dropout = problem.dropout
    coordinates = () if dropout is None else tuple(dropout.coordinates)
    return Setting(plan, capability, block, tf32, problem.lengths is not None, dropout is not None, coordinates)


def _key(setting: Setting, problem: Problem, *tensors: Tensor) -> tuple[Any, ...]:
    """Everything that launches depend on besides the plan."""
    return (
        *setting[1:], problem.scale, problem.dropped, tensors[0].dtype,
        *((x.shape, x.stride(), x.data_ptr() % 16) for x in tensors),
    )  # fmt: skip


def _refuse(plan: Plan) -> None:
    if plan.lists.reusable:
        refuse_to_record(plan.device)


class Call:
    """A prepared call for one layout, mask and set of numbers, which skips all checks and planning.

    A call is cached on the mask's indices, so it must not hold the mask. It does not hold the tensors of score
    modifications either, only their layout.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores | None = None) -> None:
        self.forward = forward_pass(*as_recorded(q, k, v), problem, changes)
        self._backwards = BoundedDict(_MOST_LAYOUTS)  # by the layout of the backward's inputs
        self.scale, self.kernels = problem.scale, problem.kernels

    def backward(
        self, problem: Callable[[], Problem], dout: Tensor, dlse: Tensor | None, saved: Saved, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v. `problem` is called only for a layout that has not occurred before."""
        dout, dlse, saved = as_kernels_read(dout, dlse, saved)
        run = self._backward_pass(problem, dout, dlse, saved)
        return run(dout, dlse, saved, lengths, None)

    def scored_backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, changes: Scores, wanted: Sequence[bool], problem: Problem
    ) -> tuple[Any, ...]:
        """The gradients of q, k and v, and of the tensors of the score modifications; see `_scored_backward`."""
        dout, dlse, saved = as_kernels_read(dout, dlse, saved)
        run: Any = self._backward_pass(lambda: problem, dout, dlse, saved, changes, wanted)
        gradients, learned = run.with_learned(dout, dlse, saved, problem.lengths, None, changes)
        return *gradients, learned

    def _backward_pass(
        self, problem: Callable[[], Problem], dout: Tensor, dlse: Tensor | None, saved: Saved,
        changes: Scores | None = None, wanted: Sequence[bool] = (),
    ) -> BackwardPass:  # fmt: skip
        q, k, v, out, _, _ = saved
        key: tuple[Any, ...] = (
            dout.stride(), q.stride(), k.stride(), v.stride(), out.stride(), dlse is None,
            dout.data_ptr() % 16, q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16,
        )  # fmt: skip
        if changes is not None:  # saved-tensor hooks may have changed the layout of their tensors
            key = (*key, *key_of_changes(changes), *wanted)
        run: BackwardPass | None = self._backwards.get(key)
        if run is None:
            made = backward_pass(
                q, k, v, out, dout, problem(), dlse=dlse is not None, changes=changes, wanted=wanted
            )  # fmt: skip
            run = self._backwards.put(key, made)
        return run


def scored_call(q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores) -> ScoredOperator:
    """The scored operator with prepared passes, for calls in half precision without dropout."""
    call = Call(q, k, v, problem, changes)
    forward: Any = call.forward
    return scored_attention.with_passes(
        lambda q, k, v, problem, changes: forward(q, k, v, problem.lengths, None, changes), call.scored_backward
    )


_MOST_LAYOUTS = 8


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises TypeError, ValueError or RuntimeError unless the kernels can read these tensors here."""
    check_layout(q, k, v)
    check_runs(q)


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
