"""Launches the Hopper backward for wide heads and for blocks of 64, prepared for tensors of one layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.triton.architecture import multiprocessors
from sparseflash.backends.triton.family import KernelChoice, Setting
from sparseflash.backends.triton.hopper.backward_pass import WALKED, Backward, BackwardLayout
from sparseflash.backends.triton.hopper.choices import described_choice
from sparseflash.backends.triton.hopper.configs import (
    ROWS,
    WIDE_KEYS,
    DkDvConfig,
    DqConfig,
    dkdv_config_for,
    dq_config_for,
    padded,
)
from sparseflash.backends.triton.hopper.descriptors import boxes_of, described_rows, read_as
from sparseflash.backends.triton.hopper.dynamic_passes import DynamicBackward, WideDynamicBackward
from sparseflash.backends.triton.hopper.forward_pass import forward_worklist
from sparseflash.backends.triton.hopper.wide_apart import wide_apart_kernel
from sparseflash.backends.triton.hopper.wide_dkdv import wide_dkdv_kernel
from sparseflash.backends.triton.hopper.wide_dq import wide_dq_kernel
from sparseflash.backends.triton.launch.launches import SOME_PARTS, launch_of
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
        device, dim, v_dim, self.tile, self.keys = setting.plan.device, q.shape[-1], v.shape[-1], tile, tile[1]
        config, self.of_dq = dkdv_config_for(dim, v_dim, tile), dq_config_for(dim, v_dim, tile)
        self.stages = config.q_stages
        numbers, lengths, (dq, dk, dv), rows = self._begin(
            setting, q, k, v, out, dout, scale, ROWS, padded(v_dim), dlse=dlse, changes=changes, wanted=wanted
        )
        read = {"q": read_as(q), "k": read_as(k), "v": read_as(v), "dout": read_as(dout)}
        sizes = [padded(sum(dims)) for dims in (config.dims, config.v_dims)]
        parts = {"parts_ptr": SOME_PARTS} if merges else {}
        constants: dict[str, Any] = {
            "PADDED_D": sizes[0], "PADDED_DV": sizes[1], "V_DIM": read["dout"].shape[-1], "Q_STAGES": config.q_stages,
            "DOUT_STAGES": config.dout_stages,
        }  # fmt: skip
        if not config.apart:
            constants["EARLY"] = config.early
        main = self._launch(
            wide_apart_kernel if config.apart else wide_dkdv_kernel, config, ROWS, constants, numbers, read,
            {"rows_desc": rows, "dk_ptr": dk, "dv_ptr": dv, **parts, **lengths}, device, WALKED,
        )  # fmt: skip
        self.main, self.computes = [main], ["dk and dv"]
        self.finish = self._launch(
            wide_dq_kernel, self.of_dq, WIDE_KEYS, {"STAGES": self.of_dq.stages, "V_STAGES": self.of_dq.v_stages},
            numbers, read, {"rows_ptr": rows, "dq_ptr": dq, **lengths}, device,
            ("work_ptr", "index_ptr", "tile_ptr", "words_ptr"),
        )  # fmt: skip
        self.part = self.keys * sum(sizes)
        self.has_gaps = sum(config.dims + config.v_dims) < sum(sizes)
        self.combine = self._combining(setting, numbers, (sizes[0], sizes[1]), dk, dv) if merges else None

    def _launch(
        self, function: Any, config: DkDvConfig | DqConfig, keys: int, constants: Mapping[str, Any],
        numbers: Mapping[str, Any], read: Mapping[str, Tensor], examples: Mapping[str, Any], device: torch.device,
        bound: Sequence[str],
    ) -> Launch:  # fmt: skip
        """The launch of a kernel that reads the tensors `read` in tiles of ROWS queries and of `keys` keys."""
        (first, rest), (v_first, v_rest) = config.dims, config.v_dims
        tiles, described = boxes_of(
            read, {"q": ROWS, "k": keys, "v": keys, "dout": ROWS},
            {"q": config.dims, "k": config.dims, "v": config.v_dims, "dout": config.v_dims},
        )  # fmt: skip
        if "rows_desc" in examples:
            described["rows_desc"] = described_rows(examples["rows_desc"], [2, ROWS])
        constants = {
            "GROUPS": config.groups, "D": first, "D_REST": rest, "DV": v_first, "DV_REST": v_rest,
            "DIM": read["q"].shape[-1], "REGISTERS": config.registers, "LOADER_REGISTERS": config.loader_registers,
            **constants,
        }  # fmt: skip
        return launch_of(
            function, constants, numbers, {**tiles, **examples}, device, described, bound=bound, num_warps=4,
            num_stages=1, registers=config.start_registers,
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
