"""Times over the ranks that torchrun started, from a barrier to the end on the slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from experiments.benchmarks.distributed.ways import ONE, PATTERNS, Compared, Setting, Way, leaves, way_of
from experiments.benchmarks.harness import Bench, reason
from experiments.training.clock import synchronize
from sparseflash import BlockMask, distributed

ROUNDS, SERIES_MS, MOST_CALLS = 5, 60.0, 20
PASSES = ("forward", "both")


def calls_of(way: Way) -> tuple[Callable[[], object], Callable[[], object]]:
    q, k, v = leaves(way)

    def both() -> None:
        torch.autograd.grad(way.attention(q, k, v), (q, k, v), way.dout)

    return lambda: way.attention(q, k, v), both


def milliseconds(call: Callable[[], object], count: int, device: torch.device) -> float:
    dist.barrier()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    taken = torch.tensor(1e3 * (time.perf_counter() - started) / count, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def counted(setting: Setting, call: Callable[[], object], plan: distributed.ShardPlan) -> int:
    before = plan.sent.bytes
    call()
    sent = torch.tensor(plan.sent.bytes - before, device=setting.device)
    dist.all_reduce(sent)
    return int(sent)


def measured(bench: Bench, path: str, setting: Setting, names: Sequence[str]) -> None:
    """Bytes: sent by all ranks in a forward, and of the live remote keys."""
    settings: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    samples: dict[tuple[str, str], list[float]] = {}
    prepared = {}
    compare = Compared(setting)
    shape = distributed.Shape(
        setting.tensors[0].shape[0], *(x.shape[1] for x in setting.tensors[:2]),
        *(x.shape[3] for x in setting.tensors[1:]), setting.tensors[0].dtype,
    )  # fmt: skip
    with ExitStack() as stack:
        for name in names:
            try:
                way = way_of(name, setting, stack)
                settings[name] = {"error": compare(way)}
                calls = calls_of(way)
            except (ValueError, RuntimeError, NotImplementedError) as error:
                failures[name] = reason(error)
                continue
            if name == "auto":
                transport = setting.plan.transport_on(setting.device)
                needed = int(setting.plan.traffic(shape.batch, shape.kv_heads).sent.sum()) * shape.key_bytes
                settings[name] |= {
                    "chosen": str(setting.plan.chosen(shape, setting.plan.machine(transport.overlaps))),
                    "sent": counted(setting, calls[0], setting.plan), "needed": needed,
                }  # fmt: skip
            counts = []
            for call in calls:
                call()
                once = milliseconds(call, 2, setting.device)
                counts.append(max(1, min(MOST_CALLS, round(SERIES_MS / once))))
            prepared[name] = calls, counts
        for _ in range(ROUNDS):
            for name, (calls, counts) in prepared.items():
                for which, call, count in zip(PASSES, calls, counts, strict=True):
                    samples.setdefault((name, which), []).append(milliseconds(call, count, setting.device))
    for name in names if dist.get_rank() == 0 else ():
        for which in PASSES:
            if name in failures:
                bench.add(f"{path}/{which}/{name}", None, "ms", failure=failures[name])
                continue
            found = samples[name, which]
            ms = median(found)
            shared = {"ranks": dist.get_world_size(), "tokens": setting.mask.q_len}
            bench.add(
                f"{path}/{which}/{name}", ms, "ms", spread=(max(found) - min(found)) / ms, **shared, **settings[name]
            )


def planned(name: str, tokens: int) -> tuple[BlockMask, distributed.ShardPlan, float]:
    taken = []
    for _ in range(3):
        mask = PATTERNS[name](tokens)
        started = time.perf_counter()
        plan = distributed.shard(mask)
        plan.stages_for(1, 1, 1)
        taken.append(1e3 * (time.perf_counter() - started))
    return mask, plan, min(taken)


def measure(
    bench: Bench, patterns: Sequence[str], tokens: int, heads: Sequence[str], dim: int, names: Sequence[str]
) -> None:
    """heads: as "32:8", query and key heads."""
    device = bench.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for number, text in enumerate(heads):
        q_heads, kv_heads = (int(count) for count in text.split(":"))
        for name in patterns:
            mask, plan, plan_ms = planned(name, tokens)
            torch.manual_seed(0)
            tensors = [
                torch.randn(1, count, tokens, dim, device=device, dtype=dtype)
                for count in (q_heads, kv_heads, kv_heads)
            ]
            setting = Setting(name, mask, tensors, torch.randn_like(tensors[0]), plan)
            measured(bench, f"{name}/heads{q_heads}of{kv_heads}", setting, names)
            if dist.get_rank() == 0:
                if number == 0:
                    bench.add(f"{name}/plan/host", plan_ms, "ms")
                bench.save()
    if dist.get_rank() == 0:
        bench.finish(over=ONE)
    dist.destroy_process_group()
