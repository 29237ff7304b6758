"""The forward by the kernels for Hopper, prepared for tensors of one layout and called with others like them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_lse, empty_out
from sparseflash.backends.triton.family import KernelChoice, Setting
from sparseflash.backends.triton.hopper.choices import described_choice
from sparseflash.backends.triton.hopper.configs import BLOCK, GROUPS, ROWS, SMALLEST_SCALE, config_for
from sparseflash.backends.triton.hopper.descriptors import as_read, described_as, read_as
from sparseflash.backends.triton.hopper.forward import forward_kernel
from sparseflash.backends.triton.hopper.plan import forward_plan, programs_of
from sparseflash.backends.triton.launcher import BoundLaunch
from sparseflash.backends.triton.portable.choice import can_describe
from sparseflash.backends.triton.portable.combine import combine_rows_kernel
from sparseflash.backends.triton.portable.launches import LOG2E, SOME_LENGTHS, SOME_PARTS, launch_of, strides_of
from sparseflash.backends.triton.portable.passes import like, one_number_of
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.worklists import Worklist
from sparseflash.blockmask import streams
from sparseflash.blockmask.cache import BoundedDict, once

_TOKENS_TO_COMBINE = 16
_SOME_COUNTERS = torch.empty(16, dtype=torch.int32, device="meta")
_counters = BoundedDict(256)  # of a device and a stream


class Forward:
    """out and lse."""

    def __init__(self, setting: Setting, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        plan, config = setting.plan, config_for(q.shape[-1])
        (heads, q_len), (kv_heads, k_len) = q.shape[1:3], k.shape[1:3]
        programs = programs_of(plan.device)
        self.plan = planned_forward(plan, programs)
        out, lse = empty_out(like(q), like(v)), empty_lse(like(q))
        self._as_they_are = all(map(can_describe, (q, k, v)))
        self._out_is_as_q = torch.empty_like(like(q)).stride() == out.stride()
        self._an_lse = one_number_of(lse, plan.device)
        self._lengths, self._stages = setting.lengths, config.stages
        scale = max(scale, SMALLEST_SCALE)
        numbers: dict[str, Any] = {
            "qk_scale": scale * LOG2E, "items": len(self.plan.work), "heads": heads, "group": heads // kv_heads,
            "q_len": q_len, "k_len": k_len, "row_tiles": -(-q_len // BLOCK[0]), "lengths_stride": 0,
        }  # fmt: skip
        constants = {
            "BLOCK_N": BLOCK[1], "D": config.dim, "GROUPS": GROUPS, "STAGES": config.stages,
            "REGISTERS": config.registers, "LOADER_REGISTERS": config.loader_registers,
        }  # fmt: skip
        tiles = {"q_desc": read_as(q), "k_desc": read_as(k), "v_desc": read_as(v), "o_desc": out}
        examples: dict[str, Any] = {**tiles, "lse_ptr": lse}
        if self.plan.merged is not None:
            examples["parts_ptr"] = SOME_PARTS
        if setting.lengths:
            examples |= {"lengths_ptr": SOME_LENGTHS, "lengths_stride": SOME_LENGTHS.stride(0)}
        examples["counter_ptr"] = _SOME_COUNTERS[:1]
        tokens = {"q_desc": ROWS, "k_desc": BLOCK[1], "v_desc": BLOCK[1], "o_desc": ROWS}
        described = {name: described_as(x, tokens[name], config.dim) for name, x in tiles.items()}
        launch = launch_of(
            forward_kernel, constants, numbers, examples, plan.device, described,
            bound=("work_ptr", "index_ptr", "tile_ptr", "words_ptr"), num_warps=4, num_stages=1,
            registers=config.start_registers,
        )  # fmt: skip
        self._launch = launch.bind(
            min(programs, len(self.plan.work)), work_ptr=self.plan.work, index_ptr=self.plan.index,
            tile_ptr=self.plan.tile, words_ptr=self.plan.words,
        )  # fmt: skip
        self._combine: BoundLaunch | None = None
        if self.plan.merged is not None:
            self._part = BLOCK[0] * (config.dim + 2)
            self._combine = self._combining(plan, self.plan.merged, numbers, scale, config.dim, out, lse)

    def _combining(
        self, plan: Plan, merged: Tensor, numbers: Mapping[str, Any], scale: float, dim: int, out: Tensor, lse: Tensor
    ) -> BoundLaunch:
        constants = {
            "DV": out.shape[-1], "PADDED_DV": dim, "BLOCK_M": BLOCK[0], "TOKENS": _TOKENS_TO_COMBINE, "DROPOUT": False,
            "KEEP": False,
        }  # fmt: skip
        by_name = {
            **numbers, "lengths_offset": 0, "amplification": 1.0, "scale": scale, "out_strides": strides_of(out),
        }  # fmt: skip
        examples = {"parts_ptr": SOME_PARTS, "out_ptr": out, "lse_ptr": lse}
        if self._lengths:
            examples["lengths_ptr"] = SOME_LENGTHS
        launch = launch_of(
            combine_rows_kernel, constants, by_name, examples, plan.device, {}, bound=("merged_ptr",), num_warps=4,
            num_stages=2,
        )  # fmt: skip
        return launch.bind(len(merged) * (BLOCK[0] // _TOKENS_TO_COMBINE), merged_ptr=merged)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, seed: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`(out, lse, None)`."""
        out = torch.empty_like(q) if self._out_is_as_q else empty_out(q, v)
        lse = torch.empty_like(self._an_lse)
        if not self._as_they_are:
            q, k, v = as_read(q), as_read(k), as_read(v)
        self.plan.ready.wait()
        given: list[Any] = [q, k, v, out, lse]
        parts = None
        if self._combine is not None:
            parts = torch.empty(self.plan.parts, self._part, dtype=torch.float32, device=q.device)
            given.append(parts)
        if lengths is not None:
            given += [lengths, lengths.stride(0)]
        given.append(counter(q.device))
        self._launch(*given)
        if self._combine is not None:
            self._combine(parts, out, lse, *(() if lengths is None else (lengths,)))
        return out, lse, None

    def launches(self) -> list[BoundLaunch]:
        """All kernels that a call launches."""
        return [self._launch, *([] if self._combine is None else [self._combine])]

    def choices(self) -> list[KernelChoice]:
        """How the kernel runs that computes."""
        return [
            described_choice("forward", BLOCK, 9, self._stages, self._launch, self.plan.work[:, 3], self.plan.parts)
        ]


def planned_forward(plan: Plan, programs: int) -> Worklist:
    """What the forward walks, from the plan's cache."""

    def make() -> Worklist:
        lists = plan.lists.get(0, Tiling(*BLOCK))
        lists.ready.wait()
        pattern, (q_len, k_len) = plan.pattern, plan.lists.tokens
        if plan.lists.pattern is not None:
            pattern = plan.lists.pattern.expand(plan.pattern.shape)
        pattern = pattern.to(lists.index.device)
        made = forward_plan(lists, pattern, q_len, k_len, programs=programs, may_wait=plan.lists.reusable)
        return made.to(plan.device)

    return once(plan.derived, ("hopper forward", programs), make)


def counter(device: torch.device) -> Tensor:
    """A zero from which the programs of one launch count, and which they leave zero.

    Launches of one stream follow one another, so they may share one. A CUDA graph may be replayed on any stream; what
    it records makes a zero of its own.
    """
    if streams.is_capturing(device):
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device, torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    found: Tensor | None = _counters.get(key)
    if found is None:
        found = _counters.put(key, torch.zeros(1, dtype=torch.int32, device=device))
    return found
