"""Inference calls like earlier ones: what an earlier call has shown is not asked again.

Of a call on a short sequence most of the time is the host's, for checks and for finding the plan and the kernel. They
all depend on the layout of the tensors, the mask and the scale alone, so a call is kept with its mask under these, and
the next one like it allocates and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.registration import nobody_watches
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.cache import mask_cache

Call = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # (q, k, v) to (out, lse)

_MOST = 64  # of a mask: who has so many layouts has few calls of each
_HALF = (torch.float16, torch.bfloat16)
_dense_calls: dict[Any, Call] = {}


# Where a call is kept, or will be: the calls of its mask, and its key among them. A plain tuple, which takes no time.
Place = tuple[dict[Any, Call], Any]


def found(place: Place) -> Call | None:
    """The call that was kept there."""
    calls, key = place
    return calls.get(key)


def keep(place: Place, call: Call) -> None:
    """Keeps a call for those like it."""
    calls, key = place
    if len(calls) >= _MOST:
        calls.clear()
    calls[key] = call


def place_of(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, scale: float | None, *, default: bool = False
) -> Place | None:
    """The place of a call, if it is one that may be kept: inference in half precision that nobody watches or casts.

    default: no backend was asked for; elsewhere than on a GPU that is not the one whose calls are kept.

    fp32 is left out because it is computed as a setting of PyTorch's says, and dynamic masks and those with lengths
    because they are new at every step. Arguments of any other kind than a right one have no place.
    """
    if not (nobody_watches(q, k, v) and q.dtype in _HALF):
        return None
    on_gpu = q.is_cuda
    if default and not on_gpu:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if torch.is_autocast_enabled("cuda" if on_gpu else q.device.type) or not (scale is None or type(scale) is float):
        return None
    if mask is None:
        calls = _dense_calls
    elif type(mask) is BlockMask and mask.lengths is None and not mask.dynamic:
        cache = mask_cache(mask.indices)
        calls = cache["calls"] if "calls" in cache else cache.setdefault("calls", {})
    else:
        return None
    # All that the checks and the launcher look at. Triton specialises to addresses that are multiples of 16 bytes.
    key = (
        q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % 16,
        k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % 16,
        v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % 16, scale,
    )  # fmt: skip
    return calls, key
