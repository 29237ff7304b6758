"""Launches the Hopper backward for wide heads, prepared for tensors of one layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_gradients_of, empty_lse
from sparseflash.backends.triton.alignment import can_describe
from sparseflash.backends.triton.family import KernelChoice, Setting
from sparseflash.backends.triton.hopper.backward_pass import Backward, BackwardLayout
from sparseflash.backends.triton.hopper.backward_plan import BackwardPlan, backward_plan, bits_by_key
from sparseflash.backends.triton.hopper.changed import numbers_of
from sparseflash.backends.triton.hopper.choices import described_choice
from sparseflash.backends.triton.hopper.configs import BLOCK, ROWS, WIDE_KEYS, WideConfig, dq_config_for
from sparseflash.backends.triton.hopper.descriptors import boxes_of, described_rows, read_as
from sparseflash.backends.triton.hopper.forward_pass import forward_worklist
from sparseflash.backends.triton.hopper.plan import ITEM_COUNT, programs_of
from sparseflash.backends.triton.hopper.rows import begin_kernel
from sparseflash.backends.triton.hopper.wide_backward import wide_backward_kernel
from sparseflash.backends.triton.hopper.wide_dq import wide_dq_kernel
from sparseflash.backends.triton.launch.examples import like, one_number_of
from sparseflash.backends.triton.launch.launches import SOME_LENGTHS, SOME_PARTS, launch_of, of_call, strides_of
from sparseflash.backends.triton.launcher import BoundLaunch, Launch
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.worklists import TileLists, Worklist
from sparseflash.scores.change import Scores


class WideBackwardLayout(BackwardLayout):
    """The launches of a backward for wide heads. They have no chains, and so serve plans with any number of them."""

    keys = WIDE_KEYS

    def __init__(
        self, setting: Setting, config: WideConfig, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor,
        scale: float, *, dlse: bool, merges: bool, changes: Scores | None = None, wanted: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        """As `BackwardLayout`. The kernel supports no score modification except a sink, which lse includes."""
        device, rows_of_step = setting.plan.device, config.rows
        (batch, heads, q_len, dim), (kv_heads, k_len), v_dim = q.shape, k.shape[1:3], v.shape[-1]
        row_tiles, steps = -(-q_len // BLOCK[0]), BLOCK[0] // rows_of_step
        self.pieces, self.learns = batch * heads * row_tiles * steps, any(wanted)
        self.as_they_are, self.stages = all(map(can_describe, (q, k, v, dout))), config.stages
        self.rows, self.sums, self.pairs, self.dpairs, self.prepared = rows_of_step, {}, None, None, []
        rows = torch.empty(self.pieces * 2, rows_of_step, device="meta")
        inputs = [like(x) for x in (q, k, v)]
        self.empty = empty_gradients_of(*inputs)
        dq, dk, dv = map(self.empty, inputs)
        lse, out = empty_lse(like(q)), like(out)
        self._workspace = {("rows_ptr", "rows_desc"): one_number_of(rows, device)}
        lengths = of_call(SOME_LENGTHS if setting.lengths else None)
        self.wants_sink = changes is not None and any(changes.by_kind(wanted).get("sink", ()))
        numbers: dict[str, Any] = {
            "counters": 0, **numbers_of(changes, scale), "scale": scale, "heads": heads, "kv_heads": kv_heads,
            "group": heads // kv_heads, "q_len": q_len, "k_len": k_len, "row_tiles": row_tiles, "lengths_stride": 0,
            "out_strides": strides_of(out), "dout_strides": strides_of(read_as(dout)), "dq_strides": strides_of(dq),
            "dk_strides": strides_of(dk), "dv_strides": strides_of(dv),
        }  # fmt: skip
        examples: dict[str, Any] = {"out_ptr": out, "dout_ptr": read_as(dout), "lse_ptr": lse}
        if dlse:
            examples["dlse_ptr"] = lse
        examples |= {"rows_ptr": rows, **lengths}
        self.begin = launch_of(
            begin_kernel, {"D": v_dim, "PADDED_D": config.v_dim, "ROWS": rows_of_step}, numbers, examples, device, {},
            bound=(), num_warps=4, num_stages=1,
        ).bind(self.pieces)  # fmt: skip
        read = {"q": read_as(q), "k": read_as(k), "v": read_as(v), "dout": read_as(dout)}
        tiles, described = boxes_of(
            read, {"q": rows_of_step, "k": WIDE_KEYS, "v": WIDE_KEYS, "dout": rows_of_step},
            {"q": config.dims, "k": config.dims, "v": (config.v_dim, 0), "dout": (config.v_dim, 0)},
        )  # fmt: skip
        described["rows_desc"] = described_rows(rows, [2, rows_of_step])
        constants = {
            "D": config.dims[0], "D_REST": config.dims[1], "DV": config.v_dim, "PADDED_D": config.padded_dim,
            "DIM": dim, "V_DIM": v_dim, "STAGES": config.stages, "REGISTERS": config.registers,
        }  # fmt: skip
        self.launch = launch_of(
            wide_backward_kernel, constants, numbers,
            {
                **tiles, "rows_desc": rows, "dk_ptr": dk, "dv_ptr": dv,
                **({"parts_ptr": SOME_PARTS} if merges else {}), **lengths,
            },
            device, described, bound=("start_ptr", "work_ptr", "entry_ptr", "words_ptr"), num_warps=8, num_stages=1,
            registers=config.start_registers,
        )  # fmt: skip
        self.of_dq = dq_config_for(dim, v_dim)
        self.finish = self._dq(device, numbers, read, {"rows_ptr": rows, "dq_ptr": dq, **lengths})
        padded = config.padded_dim, config.v_dim
        self.part, self.has_gaps = WIDE_KEYS * sum(padded), sum(config.dims) < config.padded_dim
        self.combine = self._combining(setting, numbers, padded, dk, dv) if merges else None

    def _dq(
        self, device: torch.device, numbers: Mapping[str, Any], read: Mapping[str, Tensor], examples: Mapping[str, Any]
    ) -> Launch:
        """The launch of the kernel for dq."""
        config = self.of_dq
        (first, rest), (v_first, v_rest) = config.dims, config.v_dims
        tiles, described = boxes_of(
            read, {"q": ROWS, "k": WIDE_KEYS, "v": WIDE_KEYS, "dout": ROWS},
            {"q": config.dims, "k": config.dims, "v": config.v_dims, "dout": config.v_dims},
        )  # fmt: skip
        constants = {
            "D": first, "D_REST": rest, "DV": v_first, "DV_REST": v_rest, "DIM": read["q"].shape[-1],
            "STAGES": config.stages, "V_STAGES": config.v_stages, "REGISTERS": config.registers,
            "LOADER_REGISTERS": config.loader_registers,
        }  # fmt: skip
        return launch_of(
            wide_dq_kernel, constants, numbers, {**tiles, **examples}, device, described,
            bound=("work_ptr", "index_ptr", "tile_ptr", "words_ptr"), num_warps=4, num_stages=1,
            registers=config.start_registers,
        )  # fmt: skip


class WideBackward(Backward):
    """The gradients of q, k and v of wide heads."""

    layout: WideBackwardLayout
    computes = "dk and dv"
    warps = 9

    def _bind_finish(self, setting: Setting) -> BoundLaunch:
        """The launch of the kernel for dq, which has a plan of its own."""
        self.rows = rows = planned_rows(setting.plan)
        self._ready.append(rows.ready)
        return self.layout.finish.bind(
            len(rows.work), work_ptr=rows.work, index_ptr=rows.index, tile_ptr=rows.tile, words_ptr=rows.words
        )

    def choices(self) -> list[KernelChoice]:
        """Describes both kernels for `explain`."""
        self.rows.ready.wait()
        counts = self.rows.work[:, ITEM_COUNT.value]
        block, stages = (BLOCK[0], WIDE_KEYS), self.layout.of_dq.stages
        return [*super().choices(), described_choice("dq", block, 9, stages, self._finish, counts, 0)]


def planned_rows(plan: Plan) -> Worklist:
    """The work list of the kernel for dq: tiles of queries, none cut."""
    programs = programs_of(plan.device)
    return plan.derived(("hopper dq", programs), lambda: forward_worklist(plan, BLOCK, programs, may_cut=False))


def planned_wide_backward(plan: Plan, programs: int) -> BackwardPlan:
    """The plan that the backward of wide heads walks, from the cache of `plan`. Waits for the device, once or more."""
    return plan.derived(("hopper wide backward", programs), lambda: _planned(plan, programs))


def _planned(plan: Plan, programs: int) -> BackwardPlan:
    lists = plan.lists.get(1, Tiling(*reversed(BLOCK))).to(plan.device)
    lists.ready.wait()
    halves = halved(lists, plan.lists.tokens[1])
    made = backward_plan(
        halves, plan.pattern, plan.kv_heads, *plan.lists.tokens, programs=programs, may_wait=plan.lists.reusable
    )
    return replace(made, words=bits_by_key(lists))


def halved(lists: TileLists, k_len: int) -> TileLists:
    """The lists over columns of WIDE_KEYS keys: both halves of a tile have its list. Their bits are left out."""
    held, streamed, _ = lists.tiling
    columns, halves = -(-k_len // held), -(-k_len // WIDE_KEYS)

    def of_halves(x: Tensor) -> Tensor:
        return x.view(-1, columns).repeat_interleave(held // WIDE_KEYS, dim=1)[:, :halves].reshape(-1)

    start, full, count = map(of_halves, (lists.start, lists.full, lists.count))
    tiling = Tiling(WIDE_KEYS, streamed)
    return TileLists(start, full, count, lists.index, lists.tile, lists.words[:0], tiling, lists.each)
