"""Launches the Hopper backward for wide heads and for blocks of 64, prepared for tensors of one layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_gradients_of, empty_lse
from sparseflash.backends.triton.alignment import can_describe
from sparseflash.backends.triton.architecture import multiprocessors
from sparseflash.backends.triton.changes.hopper import HopperRequest
from sparseflash.backends.triton.changes.kinds import changed_on_hopper, units_on_hopper
from sparseflash.backends.triton.family import KernelChoice, Setting
from sparseflash.backends.triton.hopper.backward_pass import WALKED, Backward, BackwardLayout
from sparseflash.backends.triton.hopper.choices import described_choice
from sparseflash.backends.triton.hopper.configs import (
    ROWS,
    WIDE_KEYS,
    DkDvConfig,
    dkdv_config_for,
    dq_config_for,
    padded,
)
from sparseflash.backends.triton.hopper.descriptors import boxes_of, described_rows, read_as
from sparseflash.backends.triton.hopper.dynamic_passes import DynamicBackward, WideDynamicBackward
from sparseflash.backends.triton.hopper.forward_pass import forward_worklist
from sparseflash.backends.triton.hopper.rows import begin_kernel
from sparseflash.backends.triton.hopper.wide_apart import wide_apart_kernel
from sparseflash.backends.triton.hopper.wide_dkdv import wide_dkdv_kernel
from sparseflash.backends.triton.hopper.wide_dq import wide_dq_kernel
from sparseflash.backends.triton.launch.launches import (
    SOME_LENGTHS,
    SOME_PARTS,
    launch_of,
    like,
    of_call,
    one_number_of,
    strides_of,
)
from sparseflash.backends.triton.launcher import BoundLaunch, Launch
from sparseflash.backends.triton.persistent.plan import ITEM_COUNT
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.backends.triton.schedule.worklists import Worklist
from sparseflash.scores.change import Scores


class WideBackwardLayout(BackwardLayout):
    """The launches of a backward for wide heads, or in tiles of 64. They have no chains, and so serve plans with any
    number of them.
    """

    def __init__(
        self, setting: Setting, tile: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor,
        scale: float, *, dlse: bool, merges: bool, changes: Scores | None = None, wanted: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        """The kernels support no score modification except a sink, which lse includes."""
        device = setting.plan.device
        (batch, heads, q_len, dim), (kv_heads, k_len), v_dim = q.shape, k.shape[1:3], v.shape[-1]
        self.dims, self.kinds = (dim, v_dim), () if changes is None else changes.kinds
        self.tile, self.keys, groups = tile, tile[1], tile[0] // ROWS
        config, self.of_dq = dkdv_config_for(dim, v_dim, tile), dq_config_for(dim, v_dim, tile)
        row_tiles = -(-q_len // tile[0])
        self.pieces = batch * heads * row_tiles * groups
        self.as_they_are, self.stages = all(map(can_describe, (q, k, v, dout))), config.q_stages
        self.rows, self.learns = ROWS, any(wanted)
        units = units_on_hopper(changes, scale, backward=True)
        self.changed = changed_on_hopper(
            changes, HopperRequest(q.dtype, k_len, device, units, ROWS, self.keys, backward=True), wanted
        )
        rows = torch.empty(self.pieces * 2, ROWS, device="meta")
        inputs = [like(x) for x in (q, k, v)]
        self.empty = empty_gradients_of(*inputs)
        dq, dk, dv = map(self.empty, inputs)
        lse, out = empty_lse(like(q)), like(out)
        self._workspace = {("rows_ptr", "rows_desc"): one_number_of(rows, device)}
        lengths = of_call(SOME_LENGTHS if setting.lengths else None)
        numbers: dict[str, Any] = {
            "counters": 0, "qk_scale": units.qk_scale, "inverse_unit": units.inverse_unit, "scale": scale,
            "heads": heads, "kv_heads": kv_heads, "group": heads // kv_heads, "q_len": q_len, "k_len": k_len,
            "row_tiles": row_tiles, "lengths_stride": 0,
            "out_strides": strides_of(out), "dout_strides": strides_of(read_as(dout)), "dq_strides": strides_of(dq),
            "dk_strides": strides_of(dk), "dv_strides": strides_of(dv),
        }  # fmt: skip
        examples: dict[str, Any] = {"out_ptr": out, "dout_ptr": read_as(dout), "lse_ptr": lse}
        if dlse:
            examples["dlse_ptr"] = lse
        examples |= {"rows_ptr": rows, **lengths}
        self.begin = launch_of(
            begin_kernel, {"D": v_dim, "PADDED_D": padded(v_dim), "ROWS": ROWS, "STEPS": groups}, numbers, examples,
            device, {}, bound=(), num_warps=4, num_stages=1,
        ).bind(self.pieces)  # fmt: skip
        read = {"q": read_as(q), "k": read_as(k), "v": read_as(v), "dout": read_as(dout)}
        parts = {"parts_ptr": SOME_PARTS} if merges else {}
        of_keys = {"rows_desc": rows, "dk_ptr": dk, "dv_ptr": dv, **parts, **lengths}
        self.main = [self._dkdv(config, device, numbers, read, of_keys)]
        self.computes = ["dk and dv"]
        self.finish = self._dq(device, numbers, read, {"rows_ptr": rows, "dq_ptr": dq, **lengths})
        sizes = [padded(sum(dims)) for dims in (config.dims, config.v_dims)]
        self.part = self.keys * sum(sizes)
        self.has_gaps = sum(config.dims + config.v_dims) < sum(sizes)
        self.combine = self._combining(setting, numbers, (sizes[0], sizes[1]), dk, dv) if merges else None

    def _dkdv(
        self, config: DkDvConfig, device: torch.device, numbers: Mapping[str, Any], read: Mapping[str, Tensor],
        examples: Mapping[str, Any],
    ) -> Launch:  # fmt: skip
        (first, rest), (v_first, v_rest) = config.dims, config.v_dims
        tiles, described = boxes_of(
            read, dict.fromkeys(read, ROWS),
            {"q": config.dims, "k": config.dims, "v": config.v_dims, "dout": config.v_dims},
        )  # fmt: skip
        described["rows_desc"] = described_rows(examples["rows_desc"], [2, ROWS])
        constants = {
            "GROUPS": config.groups, "D": first, "D_REST": rest, "DV": v_first, "DV_REST": v_rest,
            "PADDED_D": padded(first + rest), "PADDED_DV": padded(v_first + v_rest), "DIM": read["q"].shape[-1],
            "V_DIM": read["dout"].shape[-1], "Q_STAGES": config.q_stages, "DOUT_STAGES": config.dout_stages,
            "REGISTERS": config.registers, "LOADER_REGISTERS": config.loader_registers,
        }  # fmt: skip
        if not config.apart:
            constants["EARLY"] = config.early
        return launch_of(
            wide_apart_kernel if config.apart else wide_dkdv_kernel, constants, numbers, {**tiles, **examples}, device,
            described, bound=WALKED, num_warps=4, num_stages=1,
            registers=config.start_registers,
        )  # fmt: skip

    def _dq(
        self, device: torch.device, numbers: Mapping[str, Any], read: Mapping[str, Tensor], examples: Mapping[str, Any]
    ) -> Launch:
        config = self.of_dq
        (first, rest), (v_first, v_rest) = config.dims, config.v_dims
        tiles, described = boxes_of(
            read, {"q": ROWS, "k": WIDE_KEYS, "v": WIDE_KEYS, "dout": ROWS},
            {"q": config.dims, "k": config.dims, "v": config.v_dims, "dout": config.v_dims},
        )  # fmt: skip
        constants = {
            "GROUPS": config.groups, "D": first, "D_REST": rest, "DV": v_first, "DV_REST": v_rest,
            "DIM": read["q"].shape[-1], "STAGES": config.stages, "V_STAGES": config.v_stages,
            "REGISTERS": config.registers, "LOADER_REGISTERS": config.loader_registers,
        }  # fmt: skip
        return launch_of(
            wide_dq_kernel, constants, numbers, {**tiles, **examples}, device, described,
            bound=("work_ptr", "index_ptr", "tile_ptr", "words_ptr"), num_warps=4, num_stages=1,
            registers=config.start_registers,
        )  # fmt: skip


class WideBackward(Backward):
    """The gradients of q, k and v of wide heads, or in tiles of 64."""

    layout: WideBackwardLayout

    @property
    def warps(self) -> int:  # type: ignore[override]
        return 4 * self.layout.of_dq.groups + 1

    def _bind_finish(self, setting: Setting) -> BoundLaunch:
        self.rows = rows = planned_rows(setting.plan, self.layout.tile, self.layout.of_dq.programs)
        self._ready.append(rows.ready)
        return self.layout.finish.bind(
            len(rows.work), work_ptr=rows.work, index_ptr=rows.index, tile_ptr=rows.tile, words_ptr=rows.words
        )

    def dynamic(self) -> DynamicBackward | None:
        return WideDynamicBackward(self.layout, self.plan.programs)

    def choices(self) -> list[KernelChoice]:
        self.rows.ready.wait()
        counts = self.rows.work[:, ITEM_COUNT.value]
        tile, stages = self.layout.tile, self.layout.of_dq.stages
        of_dq = described_choice(
            "dq", (tile[0], WIDE_KEYS), self.warps, stages, self._finish, counts, 0, tile, self._why
        )
        return [*super().choices(), of_dq]


def planned_rows(plan: Plan, tile: tuple[int, int], programs: int) -> Worklist:
    """The work list of the kernel for dq: tiles of queries, none cut. programs: of a multiprocessor."""
    programs *= multiprocessors(plan.device)
    return plan.derived(("hopper dq", tile, programs), lambda: forward_worklist(plan, tile, programs, may_cut=False))
