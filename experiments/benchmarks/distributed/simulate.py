"""Plans for 2 to 1,024 ranks and 64K to 16M tokens: bytes, balance, modelled time, the planner's own."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from experiments.benchmarks.harness import Bench
from sparseflash import BlockMask, distributed, masks
from sparseflash.distributed import costs
from sparseflash.distributed.shards import Integers

RANKS = (2, 8, 32, 128, 1024)
TOKENS = tuple(1 << power for power in (16, 17, 18, 20, 22, 24))
SHAPE = distributed.Shape(batch=1, heads=32, kv_heads=8, dim=128, v_dim=128, dtype=torch.bfloat16)
_BLOCK = 128
_TIMES = 3  # the best counts


def documents(tokens: int) -> BlockMask:
    """64 a million tokens, with a log-normal distribution."""
    rng = np.random.default_rng(0)
    shares = rng.lognormal(sigma=1.0, size=max(4, tokens >> 14))
    lengths = np.maximum(1, (shares / shares.sum() * tokens).astype(np.int64))
    lengths[-1] += tokens - lengths.sum()
    return masks.documents(lengths, causal=True, block=_BLOCK)


# The pattern for a number of tokens; and the most tokens to plan here.
PATTERNS: dict[str, tuple[Callable[[int], BlockMask], int]] = {
    "butterfly": (lambda n: masks.butterfly(n, block=_BLOCK), 1 << 24),
    "window-4096": (lambda n: masks.local(n, window=4096, causal=True, block=_BLOCK), 1 << 24),
    "window-4096-and-64-sinks": (
        lambda n: masks.streaming(n, window=4096, sink=64, block=_BLOCK), 1 << 24,
    ),
    "documents": (documents, 1 << 22),
    "bigbird": (lambda n: masks.deepspeed_bigbird(n, block=_BLOCK), 1 << 20),
    "causal": (lambda n: masks.causal(n, block=_BLOCK), 1 << 18),
    "dense": (lambda n: BlockMask.dense(n, n, block=_BLOCK), 1 << 18),
}  # fmt: skip


def simulate(bench: Bench, patterns: list[str], tokens: list[int], ranks: list[int]) -> None:
    for pattern in patterns:
        build, most = PATTERNS[pattern]
        for count in tokens:
            if count > most:
                continue
            mask = build(count)
            for number in ranks:
                if count >= number * _BLOCK:
                    simulated(bench, f"simulated/{pattern}/{count}-tokens/{number}-ranks", number, mask)
        bench.save()


def simulated(bench: Bench, path: str, ranks: int, mask: BlockMask) -> None:
    """Modelled milliseconds of a step by way, MB of a forward pass by rank, and the planner's own time."""
    taken = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        plan = distributed.shard(mask, ranks=ranks, rank=ranks // 2)
        plan.stages_for(SHAPE.batch, SHAPE.kv_heads, 2)
        taken.append(time.perf_counter() - started)
    machine, loads = costs.default_machine(ranks), plan.loads
    estimates, chosen, counts = plan.estimates(SHAPE), plan.chosen(SHAPE), np.array(plan.keys.counts)
    keys = min((each for each in estimates if each.strategy == "keys"), key=lambda each: each.total)
    gather = keys_gathered(loads, counts, machine)
    ring = keys_in_a_ring(loads, counts, machine)
    # `queries` only if anything is sent, `heads` only with at least as many key heads as ranks.
    others = {each.strategy: each.total for each in estimates if each.strategy != "keys"}
    seconds = {
        "keys": keys.total,
        **others,
        "all-gather": gather.total,
        "ring": ring.total,
        "compute-alone": keys.compute,
    }
    for way, modelled in seconds.items():
        bench.add(f"{path}/both/{way}", 1e3 * modelled, "ms", chosen=chosen.strategy, stages=chosen.stages)
    megabytes = {"keys-mean": keys.mean_bytes, "keys-busiest": keys.most_bytes, "all-gather": gather.mean_bytes}
    for way, sent in megabytes.items():
        bench.add(f"{path}/sent/{way}", sent / 1e6, "MB")
    bench.add(
        f"{path}/plan/host", 1e3 * min(taken), "ms", assignment=plan.assignment.name,
        # Mean over maximum of live tiles; share of live tiles without remote keys.
        balance=float(loads.balance), local=float(loads.local.sum() / loads.total.sum()),
    )  # fmt: skip


def keys_gathered(loads: costs.Loads, k_tokens: Integers, machine: costs.Machine) -> costs.Estimate:
    """Every rank receives all keys before it begins (all-gather)."""
    ranks, passes = len(k_tokens), 1 + costs.BACKWARD_BYTES
    total = float(k_tokens.sum()) * SHAPE.batch * SHAPE.kv_heads * SHAPE.key_bytes
    bytes_ = total * (ranks - 1) / ranks
    transfer = passes * (bytes_ / machine.bandwidth + machine.latency)
    compute = float(loads.total.max()) * SHAPE.flops_per_score / machine.flops
    return costs.Estimate("all-gather", 1, bytes_, bytes_, compute, transfer, compute + transfer)


def keys_in_a_ring(loads: costs.Loads, k_tokens: Integers, machine: costs.Machine) -> costs.Estimate:
    """All keys go round the ranks, each step behind attention to the keys of the step before.

    The best possible ring for this mask: every step's attention is as balanced as the whole.
    """
    ranks, passes = len(k_tokens), 1 + costs.BACKWARD_BYTES
    step = float(k_tokens.max()) * SHAPE.batch * SHAPE.kv_heads * SHAPE.key_bytes
    transfer = passes * (ranks - 1) * (step / machine.bandwidth + machine.latency)
    compute = float(loads.total.max()) * SHAPE.flops_per_score / machine.flops
    last = compute / ranks
    total = max(compute, transfer + last)
    return costs.Estimate("ring", ranks - 1, step * (ranks - 1), step * (ranks - 1), compute, transfer, total)
