"""Makes the passes of the Hopper family, in the form that `dispatch.py` expects."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from sparseflash.backends.triton.architecture import multiprocessors
from sparseflash.backends.triton.family import Setting
from sparseflash.backends.triton.hopper.backward_pass import Backward, BackwardLayout, planned_backward
from sparseflash.backends.triton.hopper.choices import backward_form
from sparseflash.backends.triton.hopper.configs import SMALL, config_for, tile_for
from sparseflash.backends.triton.hopper.forward_pass import Forward, ForwardLayout, planned_forward
from sparseflash.backends.triton.hopper.wide_pass import WideBackward, WideBackwardLayout
from sparseflash.blockmask.cache import BoundedDict
from sparseflash.scores.change import Scores

_layouts = BoundedDict(256)  # of any plan of the same size, so that a new mask costs only its plan


def forward(
    setting: Setting, key: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, dropped: int,
    changes: Scores | None = None,
) -> Forward:  # fmt: skip
    """The forward of a plan for tensors like these. key: everything that the layout depends on, and the device."""
    dims = q.shape[-1], v.shape[-1]
    programs, config = multiprocessors(setting.plan.device), config_for(dims[0], tile_for(setting.block, dims), dims[1])
    work = planned_forward(setting.plan, config.tile, programs * config.streams)
    size = len(work.work), work.merged is not None
    layout: ForwardLayout | None = _layouts.get(("forward", key, size))
    if layout is None:
        made = ForwardLayout(setting, config, q, k, v, scale, size[0], merges=size[1], changes=changes)
        layout = _layouts.put(("forward", key, size), made)
    return Forward(layout, work, programs)


def backward(
    setting: Setting, key: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, scale: float, dropped: int,
    *, dlse: bool, changes: Scores | None = None, wanted: Sequence[bool] = (),
) -> Backward:  # fmt: skip
    """The backward of a plan for tensors like these. dlse: whether lse has a gradient. wanted: which tensors of the
    score modifications need a gradient.
    """
    dims = q.shape[-1], v.shape[-1]
    tile, in_two = backward_form(setting.plan, setting.block, dims, () if changes is None else changes.kinds)
    programs = multiprocessors(setting.plan.device) * (2 if tile == SMALL else 1)
    plan = planned_backward(setting.plan, programs, tile)
    size = tile, None if in_two else plan.chains, plan.parts > 0
    layout: BackwardLayout | None = _layouts.get(("backward", dlse, key, size))
    if layout is None:
        make = partial(WideBackwardLayout, tile=tile) if in_two else partial(BackwardLayout, chains=plan.chains)
        made = make(
            setting, q=q, k=k, v=v, out=out, dout=dout, scale=scale, dlse=dlse, merges=size[2], changes=changes,
            wanted=wanted,
        )  # fmt: skip
        layout = _layouts.put(("backward", dlse, key, size), made)
    return (WideBackward if in_two else Backward)(layout, plan, setting)
