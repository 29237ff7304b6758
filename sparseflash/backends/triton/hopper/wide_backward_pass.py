"""Launches the Hopper backward for wide heads, prepared for tensors of one layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_gradient, empty_lse
from sparseflash.backends.triton.alignment import can_describe
from sparseflash.backends.triton.family import Setting
from sparseflash.backends.triton.hopper.backward_pass import BackwardLayout
from sparseflash.backends.triton.hopper.backward_plan import BackwardPlan, backward_plan, bits_by_key
from sparseflash.backends.triton.hopper.changed import numbers_of
from sparseflash.backends.triton.hopper.configs import BLOCK, WIDE_KEYS, WideConfig
from sparseflash.backends.triton.hopper.descriptors import described_as, described_rows, read_as
from sparseflash.backends.triton.hopper.rows import WIDTH, begin_kernel, finish_kernel
from sparseflash.backends.triton.hopper.wide_backward import wide_backward_kernel
from sparseflash.backends.triton.launch.examples import like, one_number_of
from sparseflash.backends.triton.launch.launches import SOME_LENGTHS, SOME_PARTS, launch_of, of_call, strides_of
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.worklists import TileLists
from sparseflash.scores.change import Scores


class WideBackwardLayout(BackwardLayout):
    """The launches of a backward for wide heads, for all plans with the same number of chains."""

    keys = WIDE_KEYS

    def __init__(
        self, setting: Setting, config: WideConfig, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor,
        scale: float, chains: int, *, dlse: bool, merges: bool, changes: Scores | None = None,
        wanted: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        """As `BackwardLayout`. The kernel supports no score modification except a sink, which lse includes."""
        device, rows_of_step = setting.plan.device, config.rows
        (batch, heads, q_len, dim), (kv_heads, k_len), v_dim = q.shape, k.shape[1:3], v.shape[-1]
        row_tiles, steps = -(-q_len // BLOCK[0]), BLOCK[0] // rows_of_step
        self.pieces = batch * heads * row_tiles * steps
        self.as_they_are, self.stages = all(map(can_describe, (q, k, v, dout))), config.q_stages
        self.rows, self.sums, self.pairs, self.dpairs, self.prepared = rows_of_step, {}, None, None, []
        tiles = max(chains, 1) * steps
        counters = tiles * config.chunks
        rows, acc = (
            torch.empty(x, device="meta")
            for x in ((self.pieces * 2, rows_of_step), (tiles * rows_of_step, config.dim))
        )  # fmt: skip
        dq, dk, dv = (empty_gradient(like(x)) for x in (q, k, v))
        lse, out = empty_lse(like(q)), like(out)
        counted = torch.empty(counters, dtype=torch.int32, device="meta")
        self._workspace = [one_number_of(x, device) for x in (rows, acc, counted)]
        lengths = of_call(SOME_LENGTHS if setting.lengths else None)
        self.wants_sink = changes is not None and any(changes.by_kind(wanted).get("sink", ()))
        numbers: dict[str, Any] = {
            "counters": counters, **numbers_of(changes, scale), "scale": scale, "heads": heads, "kv_heads": kv_heads,
            "q_len": q_len, "k_len": k_len, "row_tiles": row_tiles, "lengths_stride": 0,
            "out_strides": strides_of(out), "dout_strides": strides_of(read_as(dout)), "dq_strides": strides_of(dq),
            "dk_strides": strides_of(dk), "dv_strides": strides_of(dv),
        }  # fmt: skip
        examples: dict[str, Any] = {"out_ptr": out, "dout_ptr": read_as(dout), "lse_ptr": lse}
        if dlse:
            examples["dlse_ptr"] = lse
        examples |= {"rows_ptr": rows, "counter_ptr": counted, **lengths}
        self.begin = launch_of(
            begin_kernel, {"D": v_dim, "PADDED_D": config.v_dim, "ROWS": rows_of_step}, numbers, examples, device, {},
            bound=(), num_warps=4, num_stages=1,
        ).bind(self.pieces)  # fmt: skip
        self.finish = launch_of(
            finish_kernel, {"D": dim, "PADDED_D": config.dim, "ROWS": rows_of_step}, numbers,
            {"acc_ptr": acc, "dq_ptr": dq}, device, {}, bound=("chain_ptr",), num_warps=4, num_stages=2,
        )  # fmt: skip
        read = {"q_desc": read_as(q), "k_desc": read_as(k), "v_desc": read_as(v), "dout_desc": read_as(dout)}
        boxes = {
            "q_desc": (rows_of_step, config.dim), "k_desc": (WIDE_KEYS, config.dim),
            "v_desc": (WIDE_KEYS, config.v_dim), "dout_desc": (rows_of_step, config.v_dim),
        }  # fmt: skip
        described = {name: described_as(x, *boxes[name]) for name, x in read.items()}
        described["rows_desc"] = described_rows(rows, [2, rows_of_step])
        width = WIDTH.value
        described["acc_desc"] = described_rows(
            acc, [rows_of_step * config.dim // width // config.chunks, width], (-1, width)
        )
        constants = {
            "D": config.dim, "DV": config.v_dim, "DIM": dim, "V_DIM": v_dim, "Q_STAGES": config.q_stages,
            "CHUNKS": config.chunks, "REGISTERS": config.registers,
        }  # fmt: skip
        self.launch = launch_of(
            wide_backward_kernel, constants, numbers,
            {
                **read, "rows_desc": rows, "acc_desc": acc, "dk_ptr": dk, "dv_ptr": dv, "counter_ptr": counted,
                **({"parts_ptr": SOME_PARTS} if merges else {}), **lengths,
            },
            device, described, bound=("start_ptr", "work_ptr", "entry_ptr", "words_ptr"), num_warps=8, num_stages=1,
            registers=config.start_registers, resident=True,
        )  # fmt: skip
        self.part = WIDE_KEYS * (config.dim + config.v_dim)
        padded = config.dim, config.v_dim
        self.combine = self._combining(setting, numbers, padded, dk, dv) if merges else None


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
