"""Times of attention over the ranks that torchrun started, beside one rank, all-gather and PyTorch's own.

    torchrun --nproc-per-node 2 -m experiments.benchmarks.distributed measure

One rank is first compared with attention in fp64, and every other way with one rank. Then each is timed as a forward
pass and as a forward and a backward pass, from a barrier to the end on the slowest rank; the ways take turns. Rank 0
writes measured.json and measured.md after every pattern.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.benchmarks.distributed.compared import Compared, leaves
from experiments.benchmarks.distributed.simulate import PATTERNS
from experiments.benchmarks.distributed.ways import ONE, Setting, Way, way_of
from experiments.training.atomic_files import write_json, write_text
from experiments.training.clock import synchronize
from experiments.training.distributed import find_device
from experiments.training.environment import command_line, environment, in_a_line
from sparseflash import BlockMask, distributed

ROUNDS, SERIES_MS, MOST_CALLS = 5, 60.0, 20


@dataclass
class Row:
    """Times of one way, in milliseconds, of forward passes and of forward and backward passes."""

    pattern: str
    heads: str
    way: str
    forward: list[float] = field(default_factory=list)  # one of each round
    both: list[float] = field(default_factory=list)
    error: float | None = None  # relative to what is allowed: of one rank the error, of others what they differ by
    sent: int = 0  # bytes that all ranks sent in one forward pass, counted
    needed: int = 0  # bytes of the live remote keys, once for each rank that reads them
    chosen: str = ""
    failure: str = ""

    def ms(self, name: str) -> float:
        return statistics.median(getattr(self, name))


def calls_of(way: Way) -> tuple[Callable[[], object], Callable[[], object]]:
    """A forward pass that keeps what a backward would need, and a forward and a backward pass."""
    q, k, v = leaves(way)

    def both() -> None:
        torch.autograd.grad(way.attention(q, k, v), (q, k, v), way.dout)

    return lambda: way.attention(q, k, v), both


def milliseconds(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Of one call, on the slowest rank."""
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
    """Bytes that all ranks send in one call."""
    before = plan.sent.bytes
    call()
    sent = torch.tensor(plan.sent.bytes - before, device=setting.device)
    dist.all_reduce(sent)
    return int(sent)


def measured(setting: Setting, heads: str, names: Sequence[str]) -> Iterator[Row]:
    """The rows of one pattern, all ways in turns."""
    rows: dict[str, Row] = {}
    prepared = {}
    compare = Compared(setting)
    shape = distributed.Shape(
        setting.tensors[0].shape[0], *(x.shape[1] for x in setting.tensors[:2]),
        *(x.shape[3] for x in setting.tensors[1:]), setting.tensors[0].dtype,
    )  # fmt: skip
    with ExitStack() as stack:
        for name in names:
            row = rows[name] = Row(setting.name, heads, name)
            try:
                way = way_of(name, setting, stack)
                row.error = compare(way)
                calls = calls_of(way)
            except (ValueError, RuntimeError, NotImplementedError) as error:  # the same on every rank
                row.failure = str(error).splitlines()[0]
                continue
            if name == "auto":
                transport = setting.plan.transport_on(setting.device)
                row.chosen = str(setting.plan.chosen(shape, setting.plan.machine(transport.overlaps)))
                row.sent = counted(setting, calls[0], setting.plan)
                row.needed = int(setting.plan.traffic(shape.batch, shape.kv_heads).sent.sum()) * shape.key_bytes
            counts = []
            for call in calls:
                call()
                once = milliseconds(call, 2, setting.device)
                counts.append(max(1, min(MOST_CALLS, round(SERIES_MS / once))))
            prepared[name] = calls, counts
        for _ in range(ROUNDS):
            for name, (calls, counts) in prepared.items():
                for samples, call, count in zip((rows[name].forward, rows[name].both), calls, counts, strict=True):
                    samples.append(milliseconds(call, count, setting.device))
    yield from rows.values()


def planned(name: str, tokens: int) -> tuple[BlockMask, distributed.ShardPlan, float]:
    """A mask, its plan, and the milliseconds that the host takes for a plan of a new mask, its best of three."""
    taken = []
    for _ in range(3):
        mask = PATTERNS[name][0](tokens)
        started = time.perf_counter()
        plan = distributed.shard(mask)
        plan.stages_for(1, 1, 1)
        taken.append(1e3 * (time.perf_counter() - started))
    return mask, plan, min(taken)


def markdown(rows: Sequence[Row], plans: dict[str, float], facts: dict[str, object]) -> str:
    """A table for each number of heads."""
    lines = [in_a_line(facts), ""]
    head = "| pattern | way | forward, ms | times one rank | forward and backward, ms | times one rank | error |"
    for heads in dict.fromkeys(row.heads for row in rows):
        some = [row for row in rows if row.heads == heads]
        lines += [f"### {heads} heads", "", head, "|" + "---|" * 7]
        for row in some:
            if row.failure:
                lines.append(f"| {row.pattern} | {row.way} | {row.failure} | | | | |")
                continue
            one = next((each for each in some if (each.pattern, each.way) == (row.pattern, ONE)), None)
            cells = []
            for name in ("forward", "both"):
                times = f"{one.ms(name) / row.ms(name):.3f}" if one is not None and one.forward else ""
                cells += [f"{row.ms(name):.3f}", times]
            way = f"{row.way} ({row.chosen})" if row.chosen else row.way
            error = "" if row.error is None else f"{row.error:.2f}"
            lines.append(f"| {row.pattern} | {way} | {' | '.join(cells)} | {error} |")
        lines += [""]
        lines += [
            f"{row.pattern}: {row.sent:,} bytes sent forward by {row.chosen}, {row.needed:,} of live remote keys; "
            f"plan of a new mask {plans[row.pattern]:.1f} ms."
            for row in some
            if row.chosen
        ]
        lines += [""]
    return "\n".join(lines)


def measure(
    patterns: Sequence[str], tokens: int, heads: Sequence[str], dim: int, names: Sequence[str], device_type: str,
    commit: str | None, out: Path,
) -> None:  # fmt: skip
    """Times ways for patterns, in a process of each rank. heads: as "32:8", query and key heads."""
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(
            "torchrun must start the processes: torchrun --nproc-per-node 2 -m experiments.benchmarks.distributed "
            "measure"
        )
    device = find_device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    program = "torchrun", "--nproc-per-node", str(dist.get_world_size())
    facts: dict[str, object] = {
        **environment(device, command_line("experiments.benchmarks.distributed", program=program), commit),
        "ranks": dist.get_world_size(), "tokens": tokens, "head dim": dim, "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    rows: list[Row] = []
    plans: dict[str, float] = {}
    for text in heads:
        q_heads, kv_heads = (int(number) for number in text.split(":"))
        for name in patterns:
            mask, plan, plans[name] = planned(name, tokens)
            torch.manual_seed(0)  # the same tensors on every rank
            tensors = [
                torch.randn(1, count, tokens, dim, device=device, dtype=dtype)
                for count in (q_heads, kv_heads, kv_heads)
            ]
            found = list(measured(Setting(name, mask, tensors, torch.randn_like(tensors[0]), plan), text, names))
            rows += found
            if dist.get_rank() == 0:
                for row in found:
                    print(
                        f"{text} {name}: {row.way}: {row.failure}" if row.failure else
                        f"{text} {name}: {row.way}: {row.ms('forward'):.3f}, {row.ms('both'):.3f} ms, "
                        f"error {row.error}", flush=True,
                    )  # fmt: skip
                out.mkdir(parents=True, exist_ok=True)
                write_json(
                    out / "measured.json", {"facts": facts, "plan_ms": plans, "rows": [asdict(row) for row in rows]}
                )
                write_text(out / "measured.md", markdown(rows, plans, facts))
    dist.destroy_process_group()
