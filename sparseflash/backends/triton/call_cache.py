"""Caches prepared calls, so that a repeated call skips checks and planning.

A call on a short sequence spends most of its time on the host, in checks and in finding the plan and the kernels. The
outcome depends only on the layout of the tensors, the mask and a few numbers. So a prepared call is cached on its mask,
with these as the key, and the next call with the same key only allocates and launches. With score modifications, their
kinds and the layout of their tensors are part of the key, and only the modifications are checked at each call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseflash.backends.direct import are_plain, call_directly, is_plain_call
from sparseflash.backends.problem import Problem
from sparseflash.backends.saved import Saved
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.cache import BoundedDict, mask_cache

if TYPE_CHECKING:
    from sparseflash.backends.scored import ScoredOperator
    from sparseflash.backends.triton.api import Call
    from sparseflash.scores.change import Scores

_MOST = 64  # per mask; a program with more layouts would not gain from the cache
_HALF = (torch.float16, torch.bfloat16)
_dense_calls = BoundedDict(_MOST)

# The cached calls of a mask, and the key of one of them. A plain tuple is the fastest.
Place = tuple[BoundedDict, Any]


def place_of(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, scale: float | None, kernels: str, *, on_gpu_only: bool
) -> Place | None:
    """Where a call is or will be cached; None unless it is a plain call in half precision, without autocast.

    fp32 is excluded because its arithmetic depends on a PyTorch setting, and dynamic masks because they are new at
    every step. The result is also None for invalid arguments, which the checks then report.
    """
    if not (isinstance(q, Tensor) and q.dtype in _HALF and (q.is_cuda or not on_gpu_only) and is_plain_call(q, k, v)):
        return None
    if torch.is_autocast_enabled(q.device.type) or not (scale is None or type(scale) is float):
        return None
    if mask is None:
        calls, lengths = _dense_calls, None
    elif type(mask) is BlockMask and not mask.dynamic:
        cache = mask_cache(mask.indices)
        found = cache.get("calls")
        calls = found if found is not None else cache.setdefault("calls", BoundedDict(_MOST))
        lengths = None if mask.lengths is None else mask.lengths.shape
    else:
        return None
    # Everything that the checks and the launcher depend on. Triton specialises on addresses that are multiples of 16.
    try:
        key = (
            q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % 16,
            k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % 16,
            v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % 16, scale, lengths, kernels,
        )  # fmt: skip
    except RuntimeError:
        # A sparse or nested tensor, without strides or memory. The checks refuse it later; testing for it here would
        # cost every call some time.
        return None
    if lengths is not None and lengths[1:] != key[0][:1]:  # slices, for a q without dimensions
        return None
    return calls, key


class CachedRun:
    """A cached call, applied to the mask of one call."""

    seed: Tensor | None = None

    def __init__(self, call: Call, mask: BlockMask | None) -> None:
        self._call, self._mask = call, mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `direct.Differentiable`."""
        mask = self._mask
        return self._call.forward(q, k, v, None if mask is None else mask.lengths, None)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `direct.Differentiable`."""
        lengths = None if self._mask is None else self._mask.lengths
        return self._call.backward(self.problem, dout, dlse, saved, lengths)

    def operator_backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, seed: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `direct.Differentiable`."""
        from sparseflash.backends.triton.api import attention

        return attention.backward(dout, dlse, saved, self.problem())

    def problem(self) -> Problem:
        """The problem of this call."""
        mask = self._mask
        batch = 1 if mask is None or mask.lengths is None else mask.lengths.shape[1]
        return Problem.of(mask, scale=self._call.scale, batch=batch, kernels=self._call.kernels)


def run_scored(
    place: Place, q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out, lse)` of a call with score modifications. Its key in the cache includes theirs."""
    from sparseflash.backends.triton import api

    calls, key = place
    tensors = changes.tensors()
    if not are_plain(*tensors):
        return api.scored_attention(q, k, v, problem, changes)
    key = key, *api.key_of_changes(changes), *api.insisted_gradients(problem, changes)
    call: ScoredOperator | None = calls.get(key)
    if call is None:
        api.check(q, k, v)
        api.check_gradients(q, k, v, problem, changes)
        call = calls.put(key, api.scored_call(q, k, v, problem, changes))
    return call.directly(q, k, v, problem, changes, tensors)


def run(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of a call that matches the cached one."""
    return call_directly(CachedRun(call, mask), q, k, v)
