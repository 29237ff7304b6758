"""Launches the Hopper backward: prepared for tensors of one layout, called with any tensors of that layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_gradients_of, empty_lse
from sparseflash.backends.saved import Saved
from sparseflash.backends.triton.alignment import can_describe
from sparseflash.backends.triton.device_functions.combine import TOKENS_TO_COMBINE, combine_gradients_kernel
from sparseflash.backends.triton.family import KernelChoice, Setting
from sparseflash.backends.triton.hopper import fused_plan
from sparseflash.backends.triton.hopper.backward import backward_kernel
from sparseflash.backends.triton.hopper.backward_plan import (
    ITEM_COUNT,
    ITEM_FIRST_KEY,
    ITEM_NUMBER,
    BackwardPlan,
    backward_plan,
)
from sparseflash.backends.triton.hopper.biases import biases_of
from sparseflash.backends.triton.hopper.changed import examples_of, flags_of, numbers_of, tensors_of
from sparseflash.backends.triton.hopper.choices import described_choice
from sparseflash.backends.triton.hopper.configs import BLOCK, backward_config_for
from sparseflash.backends.triton.hopper.descriptors import as_read, described_as, described_rows, read_as
from sparseflash.backends.triton.hopper.pairs import PairGradients, StoredPairGradients, pairs_of
from sparseflash.backends.triton.hopper.rows import WIDTH, begin_kernel, finish_kernel
from sparseflash.backends.triton.hopper.scores import TABLE_SUMS
from sparseflash.backends.triton.hopper.tables import entries_of
from sparseflash.backends.triton.launch.examples import like, one_number_of
from sparseflash.backends.triton.launch.gradient_sums import (
    in_order,
    over_shared,
    sink_gradient,
    sums_of_groups,
    sums_of_runs,
)
from sparseflash.backends.triton.launch.launches import SOME_LENGTHS, SOME_PARTS, launch_of, of_call, strides_of
from sparseflash.backends.triton.launch.merging import bind_merge, merge_launch
from sparseflash.backends.triton.launcher import BoundLaunch, Launch, LaunchSequence
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.blockmask.transfer import to_device
from sparseflash.dropout import Dropout
from sparseflash.scores.change import Scores


class BackwardLayout:
    """The launches of a backward for tensors of one layout and all plans with the same number of chains."""

    keys = BLOCK[1]  # of an item
    learns: bool  # whether a tensor of the score modifications needs a gradient
    has_gaps = False  # whether parts have channels that the kernel does not write
    dpairs: PairGradients | StoredPairGradients | None

    def __init__(
        self, setting: Setting, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, scale: float, chains: int,
        *, dlse: bool, merges: bool, changes: Scores | None = None, wanted: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        """merges: whether some items are parts, whose dk and dv are merged. wanted: which tensors of the score
        modifications need a gradient.
        """
        device, v_dim, self.learns = setting.plan.device, v.shape[-1], any(wanted)
        config = backward_config_for(q.shape[-1], v_dim)
        pairs = pairs_of(changes, (config.rows, BLOCK[1]))
        config = config if pairs is None else config.with_pairs()
        (batch, heads, q_len, dim), kv_heads = q.shape, k.shape[1]
        row_tiles = -(-q_len // BLOCK[0])
        steps = BLOCK[0] // config.rows  # of a tile
        self.pieces = batch * heads * row_tiles * steps
        self.as_they_are, self.stages = all(map(can_describe, (q, k, v, dout))), config.q_stages
        self.rows = config.rows
        counters = max(chains, 1) * steps
        rows, acc = (
            torch.empty(x, device="meta")
            for x in ((self.pieces * 2, config.rows), (counters * config.rows, config.dim))
        )
        inputs = [like(x) for x in (q, k, v)]
        self.empty = empty_gradients_of(*inputs)
        dq, dk, dv = map(self.empty, inputs)
        lse, out = empty_lse(like(q)), like(out)
        counted = torch.empty(counters, dtype=torch.int32, device="meta")
        self._workspace = {
            ("rows_ptr", "rows_desc"): one_number_of(rows, device), ("acc_ptr", "acc_desc"): one_number_of(acc, device),
            ("counter_ptr",): one_number_of(counted, device),
        }  # fmt: skip
        lengths = of_call(SOME_LENGTHS if setting.lengths else None)
        wanted_by_kind = {} if changes is None else changes.by_kind(wanted)
        self.wants_sink = any(wanted_by_kind.get("sink", ()))
        numbers: dict[str, Any] = {
            "counters": counters, **numbers_of(changes, scale), "scale": scale, "offset": k.shape[2] - q_len,
            "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "row_tiles": row_tiles, "lengths_stride": 0,
            "out_strides": strides_of(out), "dout_strides": strides_of(read_as(dout)), "dq_strides": strides_of(dq),
        }  # fmt: skip
        sizes = {"PADDED_D": config.dim, "ROWS": config.rows}
        examples: dict[str, Any] = {"out_ptr": out, "dout_ptr": read_as(dout), "lse_ptr": lse}
        if dlse:
            examples["dlse_ptr"] = lse
        examples |= {"rows_ptr": rows, "counter_ptr": counted, **lengths}
        self.begin = launch_of(
            begin_kernel, {**sizes, "D": v_dim}, numbers, examples, device, {}, bound=(), num_warps=4, num_stages=1
        ).bind(self.pieces)
        self.finish = launch_of(
            finish_kernel, {**sizes, "D": dim}, numbers, {"acc_ptr": acc, "dq_ptr": dq}, device, {},
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
        described["acc_desc"] = described_rows(acc, [config.rows * config.dim // width, width], (-1, width))
        constants = {
            "D": config.dim, "ROWS": config.rows, "Q_STAGES": config.q_stages, "DOUT_STAGES": config.dout_stages,
            "REGISTERS": config.registers, "CHANGES": flags_of(changes),
        }  # fmt: skip
        # Shapes of the gradient sums that the kernel writes for each item and query head, by name.
        self.sums: dict[str, tuple[int, ...]] = {}
        if any(wanted_by_kind.get("distance", ())):
            self.sums["dslopes_ptr"] = (BLOCK[1],)
        entries, more = entries_of(changes, q, numbers["inverse_unit"], device), {}
        if entries is not None:
            more = dict(entries.examples)
            if any(wanted_by_kind.get("relative", ())):
                numbers["table_size"] = entries.size
                more["buckets_ptr"] = entries.buckets
                self.sums["dtable_ptr"] = entries.size, TABLE_SUMS.value
        biases = biases_of(changes, k.shape[2], numbers["inverse_unit"], device, in_pieces=False)
        if biases is not None:
            more["biases_ptr"] = biases.example
            numbers |= biases.numbers
            if any(wanted_by_kind["key_bias"]):
                self.sums["dkey_ptr"] = (BLOCK[1],)
        self.pairs = pairs
        self.dpairs = None
        if pairs is not None:
            more |= pairs.examples
            described["pairs_desc"] = pairs.described
            numbers |= pairs.numbers
            if any(wanted_by_kind[pairs.kind]):
                self.dpairs = pairs.gradients(device)
                more["dpairs_desc"], described["dpairs_desc"] = self.dpairs.example, self.dpairs.described
        self.prepared = [each for each in (entries, biases) if each is not None]  # each prepared by its own kernel
        self.launch = launch_of(
            backward_kernel, constants, numbers,
            {
                **tiles, "rows_desc": rows, "acc_desc": acc, **written, "counter_ptr": counted,
                **({"parts_ptr": SOME_PARTS} if merges else {}), **lengths, **_of_kernel(examples_of(changes, q)),
                **{name: rows for name in self.sums}, **more,
            },
            device, described, bound=("start_ptr", "work_ptr", "entry_ptr", "words_ptr"), num_warps=8, num_stages=1,
            registers=config.start_registers, resident=True,
        )  # fmt: skip
        self.part = BLOCK[1] * 2 * config.dim
        padded = config.dim, config.dim
        self.combine = self._combining(setting, numbers, padded, dk, dv) if merges else None

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

    def workspace(self) -> dict[str, Tensor]:
        """Memory for one call, by the names of arguments, except for parts: rows of -lse and -delta, chains of dq,
        counters.
        """
        made = ((names, torch.empty_like(each)) for names, each in self._workspace.items())
        return {name: each for names, each in made for name in names}


class Backward:
    """The gradients of q, k and v."""

    computes = "dk, dv and dq"  # by the main kernel
    warps = 11

    def __init__(self, layout: BackwardLayout, plan: BackwardPlan, setting: Setting) -> None:
        self.layout, self.plan = layout, plan
        self._dpairs = None if layout.dpairs is None else layout.dpairs.bind(setting.plan, setting.block)
        self._ready = [plan.ready]
        self._finish = self._bind_finish(setting)
        # Without a live tile the entries are empty, and an empty tensor has no address; the kernel does not read this
        # one.
        entries = plan.entries if len(plan.entries) else torch.empty_like(plan.work[:1])
        self._launch = layout.launch.bind(
            plan.programs, start_ptr=plan.start, work_ptr=plan.work, entry_ptr=entries, words_ptr=plan.words
        )
        self._combine: BoundLaunch | None = None
        if layout.combine is not None:
            self._combine = bind_merge(layout.combine, plan.merged, layout.keys)
        self._kernels = LaunchSequence(layout.begin, self._launch, self._finish, self._combine)

    def _bind_finish(self, setting: Setting) -> BoundLaunch:
        """The launch that ends dq."""
        return self.layout.finish.bind(self.layout.pieces, chain_ptr=self.plan.chain)

    def __call__(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, lengths: Tensor | None, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(dq, dk, dv)`."""
        return self._run(dout, dlse, saved, lengths)[0]

    def with_learned(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, lengths: Tensor | None, dropout: Dropout | None,
        changes: Scores,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor | None]]:  # fmt: skip
        """`(dq, dk, dv)`, and the gradients of the tensors of the score modifications that the layout was made for."""
        if not self.layout.learns:
            return self._run(dout, dlse, saved, lengths, changes)[0], [None] * len(changes.tensors())
        of_kind: dict[str, Tensor | None] = {}
        heads, (batch, kv_heads, k_len, _) = saved.q.shape[1], saved.k.shape
        written = {
            name: torch.zeros(
                len(self.plan.work), heads // kv_heads, *shape, dtype=torch.float32, device=saved.q.device
            )
            for name, shape in self.layout.sums.items()
        }
        if self._dpairs is not None and self.layout.pairs is not None:
            of_kind[self.layout.pairs.kind], written["dpairs_desc"] = self._dpairs(changes)
        gradients, rows = self._run(dout, dlse, saved, lengths, changes, written)
        for name, kind in (("dslopes_ptr", "distance"), ("dtable_ptr", "relative")):
            if name in written:
                of_kind[kind] = self._sums_by_head(written[name], batch, kv_heads, k_len)
        if "dkey_ptr" in written:
            of_keys = self._sums_by_key(written["dkey_ptr"], batch, kv_heads, k_len)
            of_kind["key_bias"] = over_shared(of_keys, changes.find("key_bias").values)
        if self.layout.wants_sink:
            lse = saved.lse
            drow = rows.view(-1, 2, self.layout.rows)[:, 1].reshape(*lse.shape[:2], -1)[:, :, : lse.shape[2]]
            of_kind["sink"] = sink_gradient(changes.find("sink").logits, lse, drow)
        return gradients, in_order(changes, of_kind)

    def _sums_by_head(self, part: Tensor, batch: int, kv_heads: int, k_len: int) -> Tensor:
        """Sums `[items, group, ..., n]` over items and keys, as `[Hq, ...]`. They are added in the order of keys,
        whatever the order of items in the plan.
        """
        group, between = part.shape[1], part.shape[2:-1]
        if not self.plan.parts:
            return part.view(batch, kv_heads, -1, *part.shape[1:]).sum((0, 2, -1)).view(-1, *between)
        number, first_key = (self.plan.work[:, each.value].long() for each in (ITEM_NUMBER, ITEM_FIRST_KEY))
        order = torch.argsort(number * k_len + first_key, stable=True)
        most = -(-k_len // BLOCK[1]) + self.plan.parts
        found = sums_of_groups(part.sum(-1)[order], number[order], batch * kv_heads, None, most)
        return found.view(batch, kv_heads * group, *between).sum(0)

    def _sums_by_key(self, part: Tensor, batch: int, kv_heads: int, k_len: int) -> Tensor:
        """The sums of the parts of each tile of keys: `[items, group, KEYS]` to `[B, Hq, Nk]`."""
        group, columns = part.shape[1], -(-k_len // BLOCK[1])
        if self.plan.parts:
            number, first_key = (self.plan.work[:, each.value].long() for each in (ITEM_NUMBER, ITEM_FIRST_KEY))
            tile = number * columns + first_key // BLOCK[1]
            part = sums_of_runs(part, tile, batch * kv_heads * columns, self.plan.parts)
        by_head = part.view(batch, kv_heads, columns, group, BLOCK[1]).transpose(2, 3)
        return by_head.reshape(batch, kv_heads * group, -1)[:, :, :k_len]

    def _run(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, lengths: Tensor | None, changes: Scores | None = None,
        written: Mapping[str, Tensor] | None = None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:  # fmt: skip
        """The gradients, and the -lse and -delta that `begin_kernel` writes."""
        q, k, v, out, lse, _ = saved
        empty = self.layout.empty
        dq, dk, dv = empty(q), empty(k), empty(v)
        workspace = self.layout.workspace()
        if not self.layout.as_they_are:
            q, k, v, dout = as_read(q), as_read(k), as_read(v), as_read(dout)
        given: dict[str, Any] = {
            "out_ptr": out, "dout_ptr": dout, "lse_ptr": lse, "dlse_ptr": dlse, **workspace,
            "q_desc": q, "k_desc": k, "v_desc": v, "dout_desc": dout, "q_rest_desc": q, "k_rest_desc": k,
            "v_rest_desc": v, "dout_rest_desc": dout, "dk_desc": dk, "dv_desc": dv, "dk_ptr": dk, "dv_ptr": dv,
            "dq_ptr": dq, "x_ptr": dk, "y_ptr": dv, **of_call(lengths), **_of_kernel(tensors_of(changes, q)),
        }  # fmt: skip
        given |= written or {}
        if changes is not None:
            for each in self.layout.prepared:
                given |= each(changes)
            if self.layout.pairs is not None:
                given |= self.layout.pairs(changes)
        if self._combine is not None:
            # The merge also reads channels that no kernel writes, if some are between the pieces and a power of 2.
            make = torch.zeros if self.layout.has_gaps else torch.empty
            given["parts_ptr"] = make(self.plan.parts, self.layout.part, dtype=torch.float32, device=q.device)
        for ready in self._ready:
            ready.wait()
        self._kernels(given)
        return (dq, dk, dv), workspace["rows_ptr"]

    def launches(self) -> list[BoundLaunch]:
        """All kernels that a call launches."""
        prepared = [each.launch for each in self.layout.prepared]
        if self._dpairs is not None:
            prepared += self._dpairs.launches()
        return [*prepared, *self._kernels.launches]

    def choices(self) -> list[KernelChoice]:
        """Describes the main kernel for `explain`."""
        self.plan.ready.wait()
        counts = self.plan.work[:, ITEM_COUNT.value]
        loads = torch.stack([each.sum() for each in counts.tensor_split(self.plan.start[1:-1].tolist())])
        block = self.layout.rows, self.layout.keys
        stages, parts = self.layout.stages, self.plan.parts
        return [described_choice(self.computes, block, self.warps, stages, self._launch, loads, parts)]


def _of_kernel(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of score modifications that the kernel takes. It takes no sink: lse includes the sink."""
    return {name: x for name, x in tensors.items() if name != "sink_ptr"}


def planned_backward(plan: Plan, programs: int) -> BackwardPlan:
    """The plan that the backward walks, from the cache of `plan`. Waits for the device, once, unless the mask is
    dynamic.
    """
    return plan.derived(("hopper backward", programs), lambda: _planned(plan, programs))


def _planned(plan: Plan, programs: int) -> BackwardPlan:
    lists = plan.lists.get(1, Tiling(*reversed(BLOCK))).to(plan.device)  # small masks are planned on the host
    lists.ready.wait()
    sizes = plan.pattern, plan.kv_heads, *plan.lists.tokens
    may_wait = plan.lists.reusable
    if plan.device.type != "cuda" or not fused_plan.can_plan(lists, plan.pattern, programs):
        return backward_plan(lists, *sizes, programs=programs, may_wait=may_wait)
    rows = plan.lists.get(0, Tiling(*BLOCK))
    rows.ready.wait()
    (counted,) = to_device((rows.count,), plan.device)
    return fused_plan.backward_plan(lists, counted, *sizes, programs=programs, may_wait=may_wait)
