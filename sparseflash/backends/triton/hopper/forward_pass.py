"""Launches the Hopper forward: prepared for tensors of one layout, called with any tensors of that layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_lse, empty_out
from sparseflash.backends.triton.alignment import can_describe
from sparseflash.backends.triton.changes.hopper import HopperRequest
from sparseflash.backends.triton.changes.kinds import changed_on_hopper, units_on_hopper
from sparseflash.backends.triton.device_functions.combine import TOKENS_TO_COMBINE, combine_rows_kernel
from sparseflash.backends.triton.family import KernelChoice, Setting
from sparseflash.backends.triton.hopper.choices import described_choice
from sparseflash.backends.triton.hopper.configs import ROWS, Config
from sparseflash.backends.triton.hopper.descriptors import as_read, boxes_of, read_as
from sparseflash.backends.triton.hopper.dynamic_passes import DynamicForward
from sparseflash.backends.triton.hopper.forward import forward_kernel
from sparseflash.backends.triton.launch.launches import (
    SOME_LENGTHS,
    SOME_PARTS,
    empty_like,
    launch_of,
    like,
    of_call,
    one_number_of,
    strides_of,
)
from sparseflash.backends.triton.launch.merging import bind_merge, merge_launch
from sparseflash.backends.triton.launcher import BoundLaunch, Launch, LaunchSequence
from sparseflash.backends.triton.persistent.dynamic_plan import dynamic_forward_plan
from sparseflash.backends.triton.persistent.plan import ITEM_COUNT, forward_plan
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.worklists import Worklist
from sparseflash.blockmask import streams
from sparseflash.blockmask.cache import BoundedDict
from sparseflash.dropout import Dropout
from sparseflash.scores.change import Scores

_SOME_COUNTERS = torch.empty(16, dtype=torch.int32, device="meta")
_counters = BoundedDict(256)


class ForwardLayout:
    """The launches of a forward for tensors of one layout and all work of one size."""

    def __init__(
        self, setting: Setting, config: Config, q: Tensor, k: Tensor, v: Tensor, scale: float, items: int, *,
        merges: bool, changes: Scores | None = None,
    ) -> None:  # fmt: skip
        """items: the number of work items. merges: whether some are chunks, whose results are merged."""
        device = setting.plan.device
        (heads, q_len), (kv_heads, k_len) = q.shape[1:3], k.shape[1:3]
        out, lse = empty_out(like(q), like(v)), empty_lse(like(q))
        self.as_they_are = all(map(can_describe, (q, k, v)))
        self.out_is_as_q = empty_like(q).stride() == out.stride()
        self.an_lse = one_number_of(lse, device)
        units = units_on_hopper(changes, scale, backward=False)
        self.changed = changed_on_hopper(
            changes, HopperRequest(q.dtype, k_len, device, units, ROWS, config.keys, backward=False)
        )
        config = config.with_biases() if self.changed.has_buffers else config
        self.config, queries, keys = config, config.tile[0], config.keys
        self.part = queries * (config.padded_v_dim + 2)
        numbers: dict[str, Any] = {
            "qk_scale": units.qk_scale, "items": items, "heads": heads, "group": heads // kv_heads,
            "q_len": q_len, "k_len": k_len, "row_tiles": -(-q_len // queries), "lengths_stride": 0,
        }  # fmt: skip
        constants = {"SHAPE": config.shape, "CHANGES": self.changed.constant}
        (v_dim, v_rest), tokens = config.v_dims, {"q": ROWS, "k": keys, "v": keys, "o": ROWS}
        tiles, described = boxes_of(
            {"q": read_as(q), "k": read_as(k), "v": read_as(v), "o": out}, tokens,
            {"q": config.dims, "k": config.dims, "v": config.v_dims, "o": (v_dim // config.out_pieces, v_rest)},
        )  # fmt: skip
        examples: dict[str, Any] = {**tiles, "lse_ptr": lse, "counter_ptr": _SOME_COUNTERS[:1]}
        examples |= of_call(SOME_LENGTHS if setting.lengths else None)
        if merges:
            examples["parts_ptr"] = SOME_PARTS
        examples |= self.changed.examples
        described |= self.changed.described
        self.launch = launch_of(
            forward_kernel, constants, numbers | self.changed.numbers, examples, device, described,
            bound=("work_ptr", "index_ptr", "tile_ptr", "words_ptr"), num_warps=4, num_stages=1,
            registers=config.start_registers,
        )  # fmt: skip
        self.combine: Launch | None = None
        if merges:
            written = {"out_ptr": out, "lse_ptr": lse, **self.changed.merging}
            self.combine = self._combining(setting, numbers, scale, written)

    def _combining(
        self, setting: Setting, numbers: Mapping[str, Any], scale: float, examples: Mapping[str, Any]
    ) -> Launch:
        out = examples["out_ptr"]
        constants = {
            "DV": out.shape[-1], "PADDED_DV": self.config.padded_v_dim, "BLOCK_M": self.config.tile[0],
            "TOKENS": TOKENS_TO_COMBINE, "DROPOUT": False, "KEEP": False,
        }  # fmt: skip
        by_name = {
            **numbers, "lengths_offset": 0, "amplification": 1.0, "scale": scale, "out_strides": strides_of(out),
        }  # fmt: skip
        if setting.lengths:
            examples = {**examples, "lengths_ptr": SOME_LENGTHS}
        return merge_launch(combine_rows_kernel, constants, by_name, examples, setting.plan.device)

    def given(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """`(out, lse)`, uninitialised, and the arguments that the launches take at each call, by name."""
        out = torch.empty_like(q) if self.out_is_as_q else empty_out(q, v)
        lse = torch.empty_like(self.an_lse)
        if not self.as_they_are:
            q, k, v = as_read(q), as_read(k), as_read(v)
        given: dict[str, Any] = {
            "q_desc": q, "k_desc": k, "v_desc": v, "o_desc": out, "q_rest_desc": q, "k_rest_desc": k, "v_rest_desc": v,
            "o_rest_desc": out, "out_ptr": out, "lse_ptr": lse, "counter_ptr": counter(q.device), **of_call(lengths),
        }  # fmt: skip
        return out, lse, given


class Forward:
    """Computes out and lse."""

    def __init__(self, layout: ForwardLayout, plan: Worklist, programs: int) -> None:
        self.layout, self.plan = layout, plan
        self._launch = layout.launch.bind(
            min(programs, -(-len(plan.work) // layout.config.streams)), work_ptr=plan.work, index_ptr=plan.index,
            tile_ptr=plan.tile, words_ptr=plan.words,
        )  # fmt: skip
        self._combine: BoundLaunch | None = None
        if layout.combine is not None and plan.merged is not None:
            self._combine = bind_merge(layout.combine, plan.merged, layout.config.tile[0])
        self._kernels = LaunchSequence(self._launch, self._combine)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, dropout: Dropout | None,
        changes: Scores | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        layout = self.layout
        self.plan.ready.wait()
        out, lse, given = layout.given(q, k, v, lengths)
        if changes is not None:
            given |= layout.changed.tensors(changes)
        if self._combine is not None:
            # The merge also reads the channels between the pieces of values and the next power of 2, which no kernel
            # writes.
            make = torch.empty if layout.config.padded_v_dim == sum(layout.config.v_dims) else torch.zeros
            given["parts_ptr"] = make(self.plan.parts, layout.part, dtype=torch.float32, device=q.device)
        self._kernels(given)
        return out, lse, None

    def dynamic(self) -> DynamicForward | None:
        return DynamicForward(self.layout, self._launch.programs)

    def launches(self) -> list[BoundLaunch]:
        return [*self.layout.changed.launches, *self._kernels.launches]

    def choices(self) -> list[KernelChoice]:
        self.plan.ready.wait()
        counts = self.plan.work[:, ITEM_COUNT.value]
        config, parts = self.layout.config, self.plan.parts
        block, warps = (config.tile[0], config.keys), 8 + config.streams
        return [described_choice("forward", block, warps, config.stages, self._launch, counts, parts, config.tile)]


def planned_forward(plan: Plan, tile: tuple[int, int], programs: int) -> Worklist:
    """The work list of the forward in these tiles, from the cache of `plan`. programs: how many items run at a time."""
    return plan.derived(("hopper forward", tile, programs), lambda: forward_worklist(plan, tile, programs))


def forward_worklist(plan: Plan, tile: tuple[int, int], programs: int, *, may_cut: bool = True) -> Worklist:
    """The work list over tiles of queries, made anew. may_cut: whether long rows may be cut into chunks."""
    lists = plan.lists.get(0, Tiling(*tile))
    lists.ready.wait()
    pattern, (q_len, k_len) = plan.pattern, plan.lists.tokens
    if plan.lists.fused:
        return dynamic_forward_plan(lists, pattern, q_len)
    if plan.lists.pattern is not None:
        pattern = plan.lists.pattern.expand(plan.pattern.shape)
    pattern = pattern.to(lists.index.device)
    reusable = plan.lists.reusable
    made = forward_plan(lists, pattern, q_len, k_len, programs=programs, may_wait=reusable, may_cut=may_cut)
    return made.to(plan.device)


def counter(device: torch.device) -> Tensor:
    """A zero that the programs of one launch count up, and that is zero again when the launch ends.

    Launches on one stream follow one another, so they share a counter. A CUDA graph may be replayed on any stream, so a
    capture makes its own counter.
    """
    if streams.is_capturing(device):
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device, torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    found: Tensor | None = _counters.get(key)
    if found is None:
        found = _counters.put(key, torch.zeros(1, dtype=torch.int32, device=device))
    return found
