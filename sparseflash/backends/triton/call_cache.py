"""Caches prepared calls, so that a repeated call skips checks and planning.

A call on a short sequence spends most of its time on the host, in checks and in finding plan and kernels, which depend
only on the layout of the tensors, the mask and a few numbers. So a prepared call is cached on its mask with these as
the key, with score modifications also their types, numbers, and their tensors' layout, dtype and device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseflash.backends.direct import are_plain, as_recorded, call_directly, is_plain_call
from sparseflash.backends.operators import Run as OperatorRun
from sparseflash.backends.operators import in_dtypes_of
from sparseflash.backends.problem import Problem
from sparseflash.backends.saved import Saved
from sparseflash.backends.triton import native
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.cache import BoundedDict, mask_cache
from sparseflash.scores.change import Change, Scores

if TYPE_CHECKING:
    from sparseflash.backends.triton.dynamic_call import DynamicCall
    from sparseflash.backends.triton.family import Rows
    from sparseflash.backends.triton.prepared_call import PreparedCall

_MOST = 64  # per mask; a program with more layouts would not gain from the cache
_HALF = (torch.float16, torch.bfloat16)
_dense_calls = BoundedDict(_MOST)
_dynamic_calls = BoundedDict(_MOST)  # of all dynamic masks: see `DynamicCall`

# A plain tuple is the fastest.
Place = tuple[BoundedDict, Any]


def place_of(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, scale: float | None, kernels: str, *, on_gpu_only: bool
) -> Place | None:
    """Where a call is or will be cached; None unless it is a plain call in half precision, without autocast.

    Not for fp32, whose arithmetic depends on a PyTorch setting, and invalid arguments, which the checks then report.
    """
    if not (isinstance(q, Tensor) and q.dtype in _HALF and (q.is_cuda or not on_gpu_only) and is_plain_call()):
        return None
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(q.device.type):
        return None
    if not (scale is None or type(scale) is float):
        return None
    # Everything that the checks and the launcher depend on. Triton specialises on addresses that are multiples of 16.
    layouts = native.module().layouts(q, k, v)
    if layouts is None:  # a subclass of Tensor that may override operators, or one without memory of its own
        return None
    if mask is None:
        calls, lengths = _dense_calls, None
    elif type(mask) is not BlockMask:
        return None
    elif mask.dynamic:
        calls, lengths = _dynamic_calls, None
        layouts = layouts, _layouts_of(mask)
        if layouts[1] is None:
            return None
    else:
        cache = mask_cache(mask.indices)
        found = cache.get("calls")
        calls = found if found is not None else cache.setdefault("calls", BoundedDict(_MOST))
        lengths = None if mask.lengths is None else mask.lengths.shape
    # Kernels that were asked for by name may serve the forward alone, which is an error if gradients are needed.
    insisted = bool(kernels) and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    key = layouts, scale, lengths, insisted, kernels
    if lengths is not None and lengths[1:] != q.shape[:1]:  # slices, for a q without dimensions
        return None
    return calls, key


def _layouts_of(mask: BlockMask) -> Any:
    """Everything that the kernels of a dynamic mask depend on besides its values; None for a mask with lengths."""
    if mask.lengths is not None:
        return None
    arrays = native.module().layouts(mask.indptr, mask.indices, mask.tile, mask.words, mask.pattern)
    return None if arrays is None else (arrays, *mask._numbers())


class Run:
    """A prepared call with the mask and the score modifications of one call; see `direct.Differentiable`."""

    seed: Tensor | None = None

    def __init__(
        self, call: PreparedCall, mask: BlockMask | None, changes: Scores | None = None, tensors: Sequence[Tensor] = ()
    ) -> None:
        self._call, self._mask, self._changes = call, mask, changes
        self._wanted = [x.requires_grad for x in tensors] if tensors else []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        run: Any = self._call.forward
        lengths = None if self._mask is None else self._mask.lengths
        out, lse, kept = run(q, k, v, lengths, None, self._changes)
        if self._changes is not None:
            self._changes = self._call.without_tensors
        return out, lse, kept

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        lengths = None if self._mask is None else self._mask.lengths
        if self._changes is None:
            return self._call.backward(dout, dlse, saved, lengths, None)
        changes = self._changes.with_tensors(tensors)
        dq, dk, dv, learned = self._call.scored_backward(dout, dlse, saved, lengths, None, changes, self._wanted)
        return dq, dk, dv, *in_dtypes_of(tensors, learned)

    def repeated_backward(self, dout: Tensor, saved: Sequence[Any]) -> tuple[Tensor | None, ...] | None:
        if self._changes is not None:
            return None
        return self._call.repeated_backward(dout, saved, None if self._mask is None else self._mask.lengths)

    def operator_backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        from sparseflash.backends.triton import api

        batch = saved.q.shape[0]
        problem = Problem.of(self._mask, scale=self._call.scale, batch=batch, kernels=self._call.kernels)
        run = OperatorRun(api.attention, problem, self._changes, self._wanted)
        return run.operator_backward(dout, dlse, saved, seed, *tensors)


class DynamicRun:
    """A call with a dynamic mask; see `direct.Differentiable`."""

    seed: Tensor | None = None

    def __init__(self, call: DynamicCall, mask: BlockMask) -> None:
        self._call, self._mask = call, mask
        self._rows: Rows | None = None  # of the forward

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, None]:
        out, lse, self._rows = self._call.forward(q, k, v, self._mask)
        return out, lse, None

    def repeated_backward(self, dout: Tensor, saved: Sequence[Any]) -> tuple[Tensor | None, ...] | None:
        q, k, v, out, lse, *_ = saved
        key = native.module().layouts(dout, q, k, v, out, lse)
        if key is None or self._rows is None:
            return None
        found = self._call.backward(key, dout, Saved(q, k, v, out, lse, None), self._mask, self._rows)
        return None if found is None else (None, *found)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By a plan; the next mask needs none."""
        from sparseflash.backends.triton import api
        from sparseflash.backends.triton.prepared_call import prepared

        problem = self._problem(saved.q)
        dq, dk, dv = api.attention.direct_backward(dout, dlse, saved, problem)
        key = None if dlse is not None else native.module().layouts(dout, *saved[:5])
        made = None if key is None else prepared(*saved[:3], problem).known_backward(key)
        if made is not None:
            self._call.learn(key, made, self._mask)
        return dq, dk, dv

    def operator_backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        from sparseflash.backends.triton import api

        return api.attention.backward(dout, dlse, saved, self._problem(saved.q))

    def _problem(self, q: Tensor) -> Problem:
        return Problem.of(self._mask, scale=self._call.scale, batch=q.shape[0], kernels=self._call.kernels)


def repeated(
    place: Place, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, scores: Scores | Change | None
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """`(out, lse)` of a call that has been prepared; None for others.

    Score modifications that `Scores.prepared` replaces, such as tables by distance, are not found.
    """
    calls, key = place
    if calls is _dynamic_calls:
        made: DynamicCall | None = calls.get(key) if scores is None else None
        if made is None or mask is None or not made.serves(mask):
            return None
        return call_directly(DynamicRun(made, mask), q, k, v, have_memory=True)
    if scores is None:
        call: PreparedCall | None = calls.get(key)
        return None if call is None else call_directly(Run(call, mask), q, k, v, have_memory=True)
    if not calls or not isinstance(scores, (Scores, Change)):
        return None
    changes = scores if isinstance(scores, Scores) else Scores((scores,))
    tensors = changes.tensors()
    if not are_plain(*tensors):
        return None
    call = calls.get(_key_with(key, changes, tensors))
    if call is None:
        return None
    return call_directly(Run(call, mask, changes, tensors), q, k, v, *tensors, have_memory=True)


def first(
    place: Place, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, problem: Problem, changes: Scores | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out, lse)` of a call with prepared score modifications, which is cached for `repeated`."""
    from sparseflash.backends.triton import api
    from sparseflash.backends.triton.prepared_call import prepared

    calls, key = place
    tensors = [] if changes is None else changes.tensors()
    if calls is _dynamic_calls and mask is not None:
        return _first_of_dynamic(key, q, k, v, mask, problem, changes)
    if changes is not None:
        if not are_plain(*tensors):
            return api.attention(q, k, v, problem, changes)
        key = _key_with(key, changes, tensors)
    call: PreparedCall | None = calls.get(key)
    if call is None:
        api.check(q, k, v)
        call = prepared(q, k, v, problem, changes)
        call.check_gradients(q, k, v, changes)
        call.prepare_forward(*as_recorded(q, k, v), changes)
        calls.put(key, call)
    return call_directly(Run(call, mask, changes, tensors), q, k, v, *tensors)


def _first_of_dynamic(
    key: Any, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, problem: Problem, changes: Scores | None
) -> tuple[Tensor, Tensor]:
    """Plans this mask, and prepares the forward of others."""
    from sparseflash.backends.triton import api
    from sparseflash.backends.triton.dynamic_call import dynamic_call
    from sparseflash.backends.triton.prepared_call import prepared

    api.check_gradients(q, k, v, problem, changes)
    found = api.attention(q, k, v, problem, changes)
    if changes is None and key not in _dynamic_calls:
        call = prepared(q, k, v, problem)
        made = dynamic_call(call.forward, call.setting, mask, call.scale, problem.kernels)
        if made is not None:
            _dynamic_calls.put(key, made)
    return found


def _key_with(key: Any, changes: Scores, tensors: Sequence[Tensor]) -> Any:
    """Calls that request certain kernels also check whether these compute the gradients."""
    kernels = key[-1]  # the last entry of the key that `place_of` makes
    insisted = [x.requires_grad for x in tensors] if kernels and torch.is_grad_enabled() else ()
    return key, *changes.key(), *insisted
