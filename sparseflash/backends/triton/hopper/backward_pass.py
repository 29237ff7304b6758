"""Launches the Hopper backward: prepared for tensors of one layout, called with any tensors of that layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_gradients_of, empty_lse
from sparseflash.backends.saved import Saved
from sparseflash.backends.triton.alignment import can_describe
from sparseflash.backends.triton.changes.hopper import HopperRequest
from sparseflash.backends.triton.changes.kinds import changed_on_hopper, units_on_hopper
from sparseflash.backends.triton.device_functions.combine import TOKENS_TO_COMBINE, combine_gradients_kernel
from sparseflash.backends.triton.family import KernelChoice, Setting
from sparseflash.backends.triton.hopper.backward import backward_kernel
from sparseflash.backends.triton.hopper.choices import described_choice, reason_of_tile
from sparseflash.backends.triton.hopper.configs import BLOCK, BackwardShape, backward_config_for, used_of
from sparseflash.backends.triton.hopper.descriptors import as_read, described_as, described_rows, read_as
from sparseflash.backends.triton.hopper.dynamic_passes import DynamicBackward
from sparseflash.backends.triton.hopper.learned import HopperCall
from sparseflash.backends.triton.hopper.rows import WIDTH, begin_kernel, finish_kernel
from sparseflash.backends.triton.launch.launches import (
    SOME_LENGTHS,
    SOME_LIST,
    SOME_PARTS,
    SOME_TIMES,
    launch_of,
    like,
    of_call,
    one_number_of,
    strides_of,
)
from sparseflash.backends.triton.launch.merging import bind_merge, merge_launch
from sparseflash.backends.triton.launcher import BoundLaunch, Launch, LaunchSequence
from sparseflash.backends.triton.persistent import fused_plan
from sparseflash.backends.triton.persistent.backward_plan import ITEM_COUNT, BackwardPlan, items_alone
from sparseflash.backends.triton.persistent.timeline import rank_kernel
from sparseflash.backends.triton.persistent.within_lengths import count_kernel, keep_kernel, time_kernel
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.blockmask.transfer import to_device
from sparseflash.dropout import Dropout
from sparseflash.scores.change import Scores

WALKED = "start_ptr", "work_ptr", "entry_ptr", "words_ptr"  # names of the arrays of `BackwardPlan.walked`
WITHIN = "work_ptr", "entry_ptr"  # of them, those that a call with lengths makes anew


class BackwardLayout:
    """The launches of a backward for tensors of one layout and all plans with the same number of chains."""

    tile = BLOCK
    keys = BLOCK[1]
    computes: Sequence[str] = ("dk, dv and dq",)  # by each main launch
    learns: bool  # whether a tensor of the score modifications needs a gradient
    has_gaps = False  # whether parts have channels that the kernel does not write
    within: Sequence[Launch] = ()  # see `_leaving_out`

    def __init__(
        self, setting: Setting, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, scale: float, chains: int,
        *, dlse: bool, merges: bool, changes: Scores | None = None, wanted: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        """merges: whether some items are parts, whose dk and dv are merged. wanted: which tensors of the score
        modifications need a gradient.
        """
        device, dim, v_dim = setting.plan.device, q.shape[-1], v.shape[-1]
        config = backward_config_for(dim, v_dim, () if changes is None else changes.kinds)
        steps = BLOCK[0] // config.rows
        counted = torch.empty(max(chains, 1) * steps, dtype=torch.int32, device="meta")
        numbers, lengths, (dq, dk, dv), rows = self._begin(
            setting, q, k, v, out, dout, scale, config.rows, config.dim, counted, dlse=dlse, changes=changes,
            wanted=wanted,
        )  # fmt: skip
        config = config.with_pairs() if self.changed.has_buffers else config
        self.stages = config.q_stages
        (used, rest), (v_used, v_rest) = (used_of(x, config.dim) for x in (dim, v_dim))
        acc = torch.empty(len(counted) * config.rows, used + rest, device="meta")
        self._workspace |= {
            ("acc_ptr", "acc_desc"): one_number_of(acc, device), ("counter_ptr",): one_number_of(counted, device)
        }  # fmt: skip
        sizes = {"PADDED_D": config.dim, "ROWS": config.rows, "STEPS": steps}
        anew = WITHIN if setting.lengths else ()
        summed = {"acc_ptr": acc, "dq_ptr": dq}
        if setting.lengths:
            summed["counter_ptr"] = counted
            self.within = self._leaving_out(numbers, lengths, device)
        self.finish = launch_of(
            finish_kernel, {**sizes, "D": dim, "SENT": used + rest}, numbers, summed, device, {},
            bound=("chain_ptr",), num_warps=4, num_stages=2,
        )  # fmt: skip

        tiles = {"q_desc": read_as(q), "k_desc": read_as(k), "v_desc": read_as(v), "dout_desc": read_as(dout)}
        written = {"dk_desc": dk, "dv_desc": dv}
        described = {
            name: described_as(x, config.rows if name in ("q_desc", "dout_desc") else BLOCK[1], config.dim)
            for name, x in {**tiles, **written}.items()
        }
        described["rows_desc"] = described_rows(rows, [2, config.rows])
        width = WIDTH.value
        described["acc_desc"] = described_rows(acc, [config.rows * (rest or used) // width, width], (-1, width))
        shape = BackwardShape(
            config.dim, used, rest, v_used, v_rest, config.rows, config.joined, config.kept, config.q_stages,
            config.dout_stages, config.registers,
        )  # fmt: skip
        constants = {"SHAPE": shape, "CHANGES": self.changed.constant}
        described |= self.changed.described
        launch = launch_of(
            backward_kernel, constants, numbers | self.changed.numbers,
            {
                **tiles, "rows_desc": rows, "acc_desc": acc, **written, "counter_ptr": counted,
                **({"parts_ptr": SOME_PARTS} if merges else {}), **lengths, **dict.fromkeys(anew, SOME_LIST),
                **self.changed.examples,
            },
            device, described, bound=[name for name in WALKED if name not in anew], num_warps=8, num_stages=1,
            registers=config.start_registers, resident=True,
        )  # fmt: skip
        self.main = [launch]
        self.part, self.has_gaps = BLOCK[1] * 2 * config.dim, used + rest + v_used + v_rest < 2 * config.dim
        padded = config.dim, config.dim
        self.combine = self._combining(setting, numbers, padded, dk, dv) if merges else None

    def _begin(
        self, setting: Setting, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, scale: float, rows: int,
        padded_v: int, counted: Tensor | None = None, *, dlse: bool, changes: Scores | None, wanted: Sequence[bool],
    ) -> tuple[dict[str, Any], dict[str, Any], tuple[Tensor, Tensor, Tensor], Tensor]:  # fmt: skip
        """Prepares `begin`, which computes -lse and -delta, and all that other layouts have in common.

        rows: queries of a step. padded_v: channels of values in a tile. counted: counters that `begin` sets to 0.
        Returns `(numbers, arguments for the lengths, (dq, dk, dv), -lse and -delta)`, for the other kernels.
        """
        device = setting.plan.device
        (batch, heads, q_len, dim), (kv_heads, k_len), v_dim = q.shape, k.shape[1:3], v.shape[-1]
        self.dims, self.kinds, self.learns = (dim, v_dim), () if changes is None else changes.kinds, any(wanted)
        self.as_they_are, self.rows = all(map(can_describe, (q, k, v, dout))), rows
        units = units_on_hopper(changes, scale, backward=True)
        self.changed = changed_on_hopper(
            changes, HopperRequest(q.dtype, k_len, device, units, rows, self.keys, backward=True), wanted
        )
        row_tiles, steps = -(-q_len // self.tile[0]), self.tile[0] // rows
        self.pieces = batch * heads * row_tiles * steps
        of_rows = torch.empty(self.pieces * 2, rows, device="meta")
        self._workspace: dict[tuple[str, ...], Tensor] = {("rows_ptr", "rows_desc"): one_number_of(of_rows, device)}
        inputs = [like(x) for x in (q, k, v)]
        self.empty = empty_gradients_of(*inputs)
        dq, dk, dv = map(self.empty, inputs)
        lse, out = empty_lse(like(q)), like(out)
        lengths = of_call(SOME_LENGTHS if setting.lengths else None)
        numbers: dict[str, Any] = {
            "counters": 0 if counted is None else len(counted), "qk_scale": units.qk_scale,
            "inverse_unit": units.inverse_unit, "scale": scale, "offset": k_len - q_len,
            "heads": heads, "kv_heads": kv_heads, "group": heads // kv_heads, "q_len": q_len, "k_len": k_len,
            "row_tiles": row_tiles, "lengths_stride": 0,
            "out_strides": strides_of(out), "dout_strides": strides_of(read_as(dout)), "dq_strides": strides_of(dq),
            "dk_strides": strides_of(dk), "dv_strides": strides_of(dv),
        }  # fmt: skip
        examples: dict[str, Any] = {"out_ptr": out, "dout_ptr": read_as(dout), "lse_ptr": lse}
        if dlse:
            examples["dlse_ptr"] = lse
        if counted is not None:
            examples["counter_ptr"] = counted
        self.begin = launch_of(
            begin_kernel, {"D": v_dim, "PADDED_D": padded_v, "ROWS": rows, "STEPS": steps}, numbers,
            {**examples, "rows_ptr": of_rows, **lengths}, device, {}, bound=(), num_warps=4, num_stages=1,
        ).bind(self.pieces)  # fmt: skip
        return numbers, lengths, (dq, dk, dv), of_rows

    def _leaving_out(
        self, numbers: Mapping[str, Any], lengths: Mapping[str, Any], device: torch.device
    ) -> list[Launch]:
        """The launches of `within_lengths.py`, in their order."""
        numbers = {**numbers, "tiles": self.pieces // (self.tile[0] // self.rows)}
        constants, listed = {"TILE_ROWS": self.tile[0]}, ("plan_work_ptr", "plan_entry_ptr")
        work, time, cursor = {"work_ptr": SOME_LIST}, {"time_ptr": SOME_TIMES}, {"cursor_ptr": SOME_LIST}
        additions = {**cursor, "moment_ptr": SOME_TIMES, "added_ptr": SOME_LIST}
        kept = {**lengths, **time, **additions, "entry_ptr": SOME_LIST}
        return [
            launch_of(kernel, constants, numbers, examples, device, {}, bound=bound, num_warps=4, num_stages=1)
            for kernel, constants, examples, bound in (
                (count_kernel, constants, {**lengths, **work, **cursor}, listed),
                (time_kernel, {}, {**work, **time}, ("start_ptr",)),
                (keep_kernel, constants, kept, (*listed, "made_ptr")),
                (rank_kernel, {}, {**additions, "entries_ptr": SOME_LIST}, ("made_ptr", "chain_ptr")),
            )
        ]  # fmt: skip

    def _combining(
        self, setting: Setting, numbers: Mapping[str, Any], padded: tuple[int, int], dk: Tensor, dv: Tensor
    ) -> Launch:
        dim, k_len = dk.shape[-1], dk.shape[2]
        constants = {
            "D": dim, "DV": dv.shape[-1], "PADDED_D": padded[0], "PADDED_DV": padded[1], "BLOCK": self.keys,
            "TOKENS": TOKENS_TO_COMBINE, "DROPOUT": False,
        }  # fmt: skip
        by_name = {
            **numbers, "heads": numbers["kv_heads"], "tokens": k_len, "tiles": -(-k_len // self.keys),
            "amplification": 1.0, "lengths_offset": 0, "x_strides": strides_of(dk), "y_strides": strides_of(dv),
        }  # fmt: skip
        # Keys past the lengths have weight 0, so the merge takes no lengths.
        examples = {"x_ptr": dk, "y_ptr": dv}
        return merge_launch(combine_gradients_kernel, constants, by_name, examples, setting.plan.device)

    def given(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, lengths: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """`(dq, dk, dv)`, uninitialised, and the arguments that the launches take at each call, by name."""
        q, k, v, out, lse, _ = saved
        dq, dk, dv = self.empty(q), self.empty(k), self.empty(v)
        if not self.as_they_are:
            q, k, v, dout = as_read(q), as_read(k), as_read(v), as_read(dout)
        given: dict[str, Any] = {
            "out_ptr": out, "dout_ptr": dout, "lse_ptr": lse, "dlse_ptr": dlse,
            "q_desc": q, "k_desc": k, "v_desc": v, "dout_desc": dout, "q_rest_desc": q, "k_rest_desc": k,
            "v_rest_desc": v, "dout_rest_desc": dout, "dk_desc": dk, "dv_desc": dv, "dk_ptr": dk, "dv_ptr": dv,
            "dq_ptr": dq, "x_ptr": dk, "y_ptr": dv, **of_call(lengths),
        }  # fmt: skip
        for names, each in self._workspace.items():
            given |= dict.fromkeys(names, torch.empty_like(each))
        return (dq, dk, dv), given


class Backward:
    """Computes the gradients of q, k and v."""

    warps = 11

    def __init__(self, layout: BackwardLayout, plan: BackwardPlan, setting: Setting) -> None:
        self.layout, self.plan = layout, plan
        self._why = reason_of_tile(layout.tile, setting.plan, setting.block, layout.dims, layout.kinds)
        self._bound = [kind.bind(setting.plan, setting.block) for kind in layout.changed.all]
        self._ready = [plan.ready]
        self._finish = self._bind_finish(setting)
        walked = dict(zip(WALKED, plan.walked(), strict=True))
        self._main = [each.bind(plan.programs, **walked) for each in layout.main]
        listed = {"plan_work_ptr": plan.work, "plan_entry_ptr": walked["entry_ptr"], "start_ptr": plan.start}
        listed |= {"made_ptr": plan.made, "chain_ptr": plan.chain}
        grids = len(plan.work), plan.programs, len(plan.work), len(plan.chain) - 1
        within = [each.bind(grid, **listed) for each, grid in zip(layout.within, grids)]
        self._combine: BoundLaunch | None = None
        if layout.combine is not None:
            self._combine = bind_merge(layout.combine, plan.merged, layout.keys)
        self._kernels = LaunchSequence(layout.begin, *within, *self._main, self._finish, self._combine)

    def _bind_finish(self, setting: Setting) -> BoundLaunch:
        return self.layout.finish.bind(self.layout.pieces, chain_ptr=self.plan.chain)

    def __call__(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, lengths: Tensor | None, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._run(dout, dlse, saved, lengths)[0]

    def with_learned(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, lengths: Tensor | None, dropout: Dropout | None,
        changes: Scores,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor | None]]:  # fmt: skip
        """`(dq, dk, dv)`, and the gradients of the tensors of the score modifications that the layout was made for."""
        if not self.layout.learns:
            return self._run(dout, dlse, saved, lengths, changes)[0], [None] * len(changes.tensors())
        changed = self.layout.changed
        call = HopperCall(self.plan, saved.q, saved.k, saved.lse, has_lengths=lengths is not None)
        kinds = list(zip(changed.all, changes.changes, self._bound))
        memory = [kind.memory(change, call, bound) for kind, change, bound in kinds]
        gradients, rows = self._run(dout, dlse, saved, lengths, changes, changed.memory_arguments(memory))
        call.drow = lambda: self._drow(rows, saved.lse)
        found: list[Tensor | None] = []  # only the first tensor of a score modification has a gradient
        for (kind, change, _), written in zip(kinds, memory):
            if tensors := change.tensors():
                found += [kind.gradient(change, call, written), *[None] * (len(tensors) - 1)]
        return gradients, found

    def _drow(self, rows: Tensor, lse: Tensor) -> Tensor:
        """-delta of every query, `[B, Hq, Nq]`, from the numbers that `begin_kernel` writes."""
        return rows.view(-1, 2, self.layout.rows)[:, 1].reshape(*lse.shape[:2], -1)[:, :, : lse.shape[2]]

    def _run(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, lengths: Tensor | None, changes: Scores | None = None,
        written: Mapping[str, Tensor] | None = None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:  # fmt: skip
        gradients, given = self.layout.given(dout, dlse, saved, lengths)
        given |= written or {}
        if self.layout.within:
            given |= self._lists_within()
        if changes is not None:
            given |= self.layout.changed.tensors(changes)
        if self._combine is not None:
            # The merge also reads channels that no kernel writes, if some are between the pieces and a power of 2.
            make = torch.zeros if self.layout.has_gaps else torch.empty
            given["parts_ptr"] = make(self.plan.parts, self.layout.part, dtype=torch.float32, device=dout.device)
        for ready in self._ready:
            ready.wait()
        self._kernels(given)
        return gradients, given["rows_ptr"]

    def _lists_within(self) -> dict[str, Tensor]:
        """Memory for the lists of what lies within the lengths of a call."""
        work, entries = torch.empty_like(self.plan.work), torch.empty_like(self.plan.walked()[2])
        time, moment = (x.new_empty(len(x), dtype=torch.int64) for x in (work, entries))
        return {
            "work_ptr": work, "time_ptr": time, "entry_ptr": entries, "entries_ptr": entries, "moment_ptr": moment,
            "added_ptr": entries.new_empty(len(entries)), "cursor_ptr": torch.empty_like(self.plan.chain),
        }  # fmt: skip

    def dynamic(self) -> DynamicBackward | None:
        return DynamicBackward(self.layout, self.plan.programs)

    def launches(self) -> list[BoundLaunch]:
        prepared = list(self.layout.changed.launches)
        for kind, bound in zip(self.layout.changed.all, self._bound):
            prepared += kind.launches_of(bound)
        return [*prepared, *self._kernels.launches]

    def choices(self) -> list[KernelChoice]:
        self.plan.ready.wait()
        counts = self.plan.work[:, ITEM_COUNT.value]
        loads = torch.stack([each.sum() for each in counts.tensor_split(self.plan.start[1:-1].tolist())])
        block = self.layout.rows, self.layout.keys
        stages, parts = self.layout.stages, self.plan.parts
        return [
            described_choice(computes, block, self.warps, stages, main, loads, parts, self.layout.tile, self._why)
            for computes, main in zip(self.layout.computes, self._main, strict=True)
        ]


def planned_backward(plan: Plan, programs: int, tile: tuple[int, int] = BLOCK) -> BackwardPlan:
    """The plan that the backward walks, from the cache of `plan`: on a CPU, only its items. Waits for the device, once,
    unless the mask is dynamic.
    """
    return plan.derived(("hopper backward", tile, programs), lambda: _planned(plan, programs, tile))


def _planned(plan: Plan, programs: int, tile: tuple[int, int]) -> BackwardPlan:
    lists = plan.lists.get(1, Tiling(*reversed(tile))).to(plan.device)
    lists.ready.wait()
    (q_len, k_len), may_wait = plan.lists.tokens, plan.lists.reusable
    if plan.device.type != "cuda":
        return items_alone(lists, plan.pattern, plan.kv_heads, k_len, programs=programs, may_wait=may_wait)
    rows = plan.lists.get(0, Tiling(*tile))
    rows.ready.wait()
    (counted,) = to_device((rows.count,), plan.device)
    sizes = plan.kv_heads, q_len, k_len
    return fused_plan.backward_plan(lists, counted, plan.pattern, *sizes, programs=programs, may_wait=may_wait)
