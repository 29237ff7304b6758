"""The Hopper kernels, compiled as launches would compile them, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from triton.runtime import driver

from experiments.benchmarks.compile.changes import change
from experiments.benchmarks.compile.without_gpu import NoDevice
from sparseflash import BlockMask, clear_caches, masks
from sparseflash.backends.problem import Problem
from sparseflash.backends.triton.hopper import passes
from sparseflash.backends.triton.persistent import cuts, plan
from sparseflash.backends.triton.prepared_call import setting_of
from sparseflash.scores.change import PAIRS, Scores, Sizes

ARCH = 90
TOKENS = 512
KINDS = ("softcap", "alibi", "log", "sink", "table", "key_bias", *PAIRS)
FEATURES = ("small", "spread", "lengths", "parts", *KINDS, "learned", "dead")


def compiled(
    dim: int, dtype: torch.dtype, features: Sequence[str] = (), v_dim: int | None = None
) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """The kernels of a forward and a backward: `{name: (compiled kernel, names of its arguments)}`.

    features: "small": blocks of 64; "spread": every second block is dead; "lengths";
    "parts": rows of the forward and columns of the backward are split; KINDS; "learned": their tensors
    require gradients; "dead": some tiles are.
    """
    if unknown := set(features) - set(FEATURES):
        raise ValueError(f"features must be of {', '.join(FEATURES)}; got {', '.join(sorted(unknown))}")
    q, v = (torch.empty(1, 2, TOKENS, each, dtype=dtype) for each in (dim, v_dim or dim))
    block = 64 if "small" in features else 128
    mask = (masks.causal if "dead" in features else BlockMask.dense)(TOKENS, block=block)
    if "spread" in features:
        place = torch.arange(TOKENS // block)
        mask = BlockMask.from_layout((place + place[:, None]) % 2 == 0, block=block)
    unpadded = mask
    if "lengths" in features:
        mask = mask.with_lengths(torch.tensor([100]))
    parts = "parts" in features
    with (
        mock.patch.object(plan, "RULE", plan.Rule(far=0.0, chunk=1, worth=1.0) if parts else plan.RULE),
        mock.patch.object(cuts, "RULE", cuts.Rule(far=0, worth=0, shortest=1) if parts else cuts.RULE),
        mock.patch.object(driver, "_active", NoDevice(ARCH)),
    ):
        clear_caches()  # passes are cached by a key, plans by their mask
        setting = setting_of(q, q, Problem.of(mask, scale=1.0), divmod(ARCH, 10))
        changes, wanted = _changes(features, unpadded, dtype), []
        if changes is not None:
            changes = changes.prepared(Sizes(1, 2, TOKENS, TOKENS, q.device, mask))
            wanted = ["learned" in features for _ in changes.tensors()]
        both = (
            passes.forward(setting, "", q, q, v, 1.0, 0, changes),
            passes.backward(setting, "", q, q, v, v, v, 1.0, 0, dlse=False, changes=changes, wanted=wanted),
        )
        found = {}
        for launch in (each for run in both for each in run.launches()):
            variant = launch.launch.variant
            name = variant.function.__name__
            found[name if name not in found else f"{name}, second"] = launch.compiled(), variant.names
    return found


def _changes(features: Sequence[str], mask: BlockMask, dtype: torch.dtype) -> Scores | None:
    found = Scores(())
    for kind in (kind for kind in KINDS if kind in features):
        found = found + change(kind, mask, 2, dtype)
    return found if found.changes else None
