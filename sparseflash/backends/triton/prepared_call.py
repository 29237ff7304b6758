"""Calls of the Triton backend, prepared: their kernels are chosen, planned and bound once for each mask and layout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.problem import Problem
from sparseflash.backends.registration import empty_out
from sparseflash.backends.saved import Saved
from sparseflash.backends.triton import device as gpu
from sparseflash.backends.triton import native
from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.compile_ahead import compile_side_by_side
from sparseflash.backends.triton.device import refuse_to_record
from sparseflash.backends.triton.dispatch import Decision, decide, has_short_tiles, warn_if_slower
from sparseflash.backends.triton.family import BackwardPass, Family, ForwardPass, Request, Setting
from sparseflash.backends.triton.launch.launches import like
from sparseflash.backends.triton.schedule.plan import dense_plan, plan_of
from sparseflash.blockmask.cache import BoundedDict, mask_cache
from sparseflash.dropout import Dropout
from sparseflash.limits import check_near
from sparseflash.scores.change import Scores

_SHORT = 64  # without a mask, tiles have at most this many tokens if neither q nor k is longer
_MOST = 64  # calls per mask; a program with more layouts would not gain from the cache
_MOST_LAYOUTS = 8  # of the backward's inputs, per call
_dense_calls = BoundedDict(_MOST)


class PreparedCall:
    """The kernels of both passes for one mask, layout of tensors and set of numbers.

    Cached on the mask's indices, so it must hold neither the mask nor tensors of a call, only their layout.
    """

    def __init__(self, setting: Setting, key: tuple[Any, ...], problem: Problem, changes: Scores | None = None) -> None:
        self.setting, self.scale, self.dropped, self.kernels = setting, problem.scale, problem.dropped, problem.kernels
        self.forward: ForwardPass | None = None
        self.without_tensors: Scores | None = None
        if changes is not None:
            self.without_tensors = changes.with_tensors([None] * len(changes.tensors()))  # type: ignore[list-item]
        self._key = key
        self._decisions: dict[tuple[bool, ...], tuple[Request, Decision]] = {}
        self._backwards = BoundedDict(_MOST_LAYOUTS)
        self._read_as_they_are = BoundedDict(_MOST_LAYOUTS)

    def decision(
        self, q: Tensor, v: Tensor, changes: Scores | None = None, wanted: Sequence[bool] = (), *, backward: bool
    ) -> tuple[Request, Decision]:
        key = backward, *wanted
        found = self._decisions.get(key)
        if found is None:
            request = Request.of(self.setting, q, v, changes, wanted, backward=backward)
            found = self._decisions[key] = request, decide(request, self.kernels)
        return found

    def _serving(
        self, q: Tensor, v: Tensor, changes: Scores | None, wanted: Sequence[bool] = (), *, backward: bool
    ) -> Family:
        request, decision = self.decision(q, v, changes, wanted, backward=backward)
        family, plan = decision.serving(), self.setting.plan
        if plan.lists.reusable:
            refuse_to_record(plan.device)
        warn_if_slower(request, decision)
        return family

    def check_gradients(self, q: Tensor, k: Tensor, v: Tensor, changes: Scores | None = None) -> None:
        """Raises ValueError if the call requests kernels that cannot compute a gradient it needs. Otherwise the error
        would come only in the backward.
        """
        if self.kernels and torch.is_grad_enabled():
            wanted = [] if changes is None else [x.requires_grad for x in changes.tensors()]
            if q.requires_grad or k.requires_grad or v.requires_grad or any(wanted):
                self.decision(q, v, changes, wanted, backward=True)[1].serving()

    def prepare_forward(self, q: Tensor, k: Tensor, v: Tensor, changes: Scores | None = None) -> ForwardPass:
        """The forward, `self.forward` from now on, for tensors of this layout.

        Its kernels are compiled beside the backward's, if one will follow.
        """
        if self.forward is not None:
            return self.forward
        family = self._serving(q, v, changes, backward=False)
        forward, _ = family.passes()
        key = q.device, family.name, self._key
        made = forward(self.setting, key, q, k, v, self.scale, self.dropped, changes=changes)
        launches = made.launches()
        # Inside of an autograd.Function grad mode is off, so requires_grad shows whether a backward will follow: see
        # `as_recorded`.
        follows = q.requires_grad or k.requires_grad or v.requires_grad
        is_recorded = follows or torch.is_grad_enabled()
        wanted = [] if changes is None else [is_recorded and x.requires_grad for x in changes.tensors()]
        if (follows or any(wanted)) and self.decision(q, v, changes, wanted, backward=True)[1].family is not None:
            out = empty_out(like(q), like(v))
            compile_side_by_side(launches, fewest=1)
            with suppress(ValueError):  # the backward raises when it is called
                self.backward_pass(q, k, v, out, out, dlse=False, changes=changes, wanted=wanted)
        else:
            compile_side_by_side(launches)
        self.forward = made
        return made

    def backward_pass(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, *, dlse: bool, changes: Scores | None = None,
        wanted: Sequence[bool] = (),
    ) -> BackwardPass:  # fmt: skip
        """The backward for tensors of this layout: hooks for saved tensors may have changed the one of the forward.

        out, dout: examples, if this is prepared with the forward. dlse: whether a gradient arrives for lse.
        """
        key: tuple[Any, ...] = (
            dout.stride(), q.stride(), k.stride(), v.stride(), out.stride(), dlse,
            dout.data_ptr() % 16, q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16,
        )  # fmt: skip
        if changes is not None:
            key = (*key, *changes.key(), *wanted)
        made: BackwardPass | None = self._backwards.get(key)
        if made is None:
            family = self._serving(q, v, changes, wanted, backward=True)
            # The forward has checked its tensors; hooks may have given saved ones another layout.
            for name, x in () if out.is_meta else (("q", q), ("k", k), ("v", v), ("out", out)):
                check_near(x, name)
            _, backward = family.passes()
            made = backward(
                self.setting, (q.device, family.name, self._key, key), q, k, v, out, dout, self.scale, self.dropped,
                dlse=dlse, changes=changes, wanted=wanted,
            )  # fmt: skip
            self._backwards.put(key, made)
            compile_side_by_side(made.launches())
        return made

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, lengths: Tensor | None, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = dout, dlse, saved
        dout, dlse, saved = as_kernels_read(*given)
        run = self.backward_pass(*saved[:4], dout, dlse=dlse is not None)
        if dlse is None and saved.kept is None and dout is given[0] and saved is given[2]:
            key = native.module().layouts(dout, *saved[:5])
            if key is not None:
                self._read_as_they_are.put(key, run)
        return run(dout, dlse, saved, lengths, dropout)

    def known_backward(self, layouts: Any) -> BackwardPass | None:
        """The backward for `(dout, q, k, v, out, lse)` of these layouts, if an earlier one read them as they were."""
        found: BackwardPass | None = self._read_as_they_are.get(layouts)
        return found

    def repeated_backward(
        self, dout: Tensor, saved: Sequence[Any], lengths: Tensor | None
    ) -> tuple[None, Tensor, Tensor, Tensor] | None:
        """None and the gradients of q, k and v, in the fewest steps; None for tensors that no earlier `backward` read
        as they were. For calls without dropout, as in most trainings; see `direct.Differentiable`.
        """
        q, k, v, out, lse, kept, *_ = saved
        key = native.module().layouts(dout, q, k, v, out, lse)
        run: BackwardPass | None = None if key is None or kept is not None else self._read_as_they_are.get(key)
        if run is None:
            return None
        return None, *run(dout, None, Saved(q, k, v, out, lse, None), lengths, None)

    def scored_backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, lengths: Tensor | None, dropout: Dropout | None,
        changes: Scores, wanted: Sequence[bool],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:  # fmt: skip
        dout, dlse, saved = as_kernels_read(dout, dlse, saved)
        run: Any = self.backward_pass(*saved[:4], dout, dlse=dlse is not None, changes=changes, wanted=wanted)
        gradients, learned = run.with_learned(dout, dlse, saved, lengths, dropout, changes)
        return *gradients, learned


def prepared(q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores | None = None) -> PreparedCall:
    """The prepared call for tensors of this layout, from the cache of the mask."""
    setting = setting_of(q, k, problem, gpu.capability_of(q.device))
    key = key_of(setting, problem, q, k, v, changes)
    if problem.indices is None:
        calls = _dense_calls
        key = setting.plan.device, *key
    else:
        cache = mask_cache(problem.indices)
        found = cache.get("prepared")
        calls = found if found is not None else cache.setdefault("prepared", BoundedDict(_MOST))
    call: PreparedCall | None = calls.get(key)
    return calls.put(key, PreparedCall(setting, key, problem, changes)) if call is None else call


def key_of(
    setting: Setting, problem: Problem, q: Tensor, k: Tensor, v: Tensor, changes: Scores | None = None
) -> tuple[Any, ...]:  # fmt: skip
    """Everything that a prepared call depends on besides the plan, except for the values of tensors."""
    return (
        *setting[1:], problem.scale, problem.dropped, problem.kernels, q.dtype,
        *[(x.shape, x.stride(), x.data_ptr() % 16) for x in (q, k, v)], *(() if changes is None else changes.key()),
    )  # fmt: skip


def setting_of(
    q: Tensor, k: Tensor, problem: Problem, capability: tuple[int, int], device: torch.device | None = None
) -> Setting:
    """device: for the plan of dense attention; q's device by default."""
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
