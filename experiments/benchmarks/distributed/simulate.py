"""Plans for 2 to 1,024 ranks and 64K to 16M tokens, without any: bytes, balance, modelled time, the planner's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch

from sparseflash import BlockMask, distributed, masks
from sparseflash.distributed import costs

RANKS = (2, 8, 32, 128, 1024)
TOKENS = tuple(1 << power for power in (16, 17, 18, 20, 22, 24))
SHAPE = distributed.Shape(batch=1, heads=32, kv_heads=8, dim=128, v_dim=128, dtype=torch.bfloat16)
_BLOCK = 128
_TIMES = 3  # the planner is timed; its best time counts


def documents(tokens: int) -> BlockMask:
    """Packed causal documents of very different lengths: 64 a million tokens, with a log-normal distribution."""
    rng = np.random.default_rng(0)
    shares = rng.lognormal(sigma=1.0, size=max(4, tokens >> 14))
    lengths = np.maximum(1, (shares / shares.sum() * tokens).astype(np.int64))
    lengths[-1] += tokens - lengths.sum()
    return masks.documents(lengths, causal=True, block=_BLOCK)


# The pattern of so many tokens, and the most tokens at which its lists are still short enough to plan here.
PATTERNS: dict[str, tuple[Callable[[int], BlockMask], int]] = {
    "butterfly": (lambda n: masks.butterfly(n, block=_BLOCK), 1 << 24),
    "local, causal, 4,096 keys": (lambda n: masks.local(n, window=4096, causal=True, block=_BLOCK), 1 << 24),
    "streaming, 4,096 keys and 64 sinks": (
        lambda n: masks.streaming(n, window=4096, sink=64, block=_BLOCK), 1 << 24,
    ),
    "packed documents": (documents, 1 << 22),
    "BigBird of DeepSpeed": (lambda n: masks.deepspeed_bigbird(n, block=_BLOCK), 1 << 20),
    "causal": (lambda n: masks.causal(n, block=_BLOCK), 1 << 18),
    "dense": (lambda n: BlockMask.dense(n, n, block=_BLOCK), 1 << 18),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One plan. Bytes are of a forward pass, in MB a rank; times of forward and backward, in ms, are modelled."""

    pattern: str
    tokens: int
    ranks: int
    assignment: str
    balance: float  # live tiles of the mean rank relative to the most loaded one
    local: float  # share of the live tiles that need no remote key
    mean_mb: float
    busiest_mb: float
    gather_mb: float
    strategy: str
    stages: int
    keys_ms: float
    queries_ms: float | None  # None: nothing travels
    heads_ms: float | None  # None: fewer key heads than ranks
    gather_ms: float
    ring_ms: float
    compute_ms: float
    plan_ms: float  # of the host, measured, the best of three: assignment, routes and masks of one rank


def simulated(pattern: str, tokens: int, ranks: int, mask: BlockMask) -> Row:
    """One row; the mask is that of the pattern."""
    taken = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        plan = distributed.shard(mask, ranks=ranks, rank=ranks // 2)
        plan.stages_for(SHAPE.batch, SHAPE.kv_heads, 2)
        taken.append(time.perf_counter() - started)
    plan_ms = 1e3 * min(taken)
    machine, loads = costs.default_machine(ranks), plan.loads
    estimates = plan.estimates(SHAPE)
    keys = min((each for each in estimates if each.strategy == "keys"), key=lambda each: each.total)
    queries, heads = (
        next((1e3 * each.total for each in estimates if each.strategy == name), None) for name in ("queries", "heads")
    )
    chosen, counts = plan.chosen(SHAPE), np.array(plan.keys.counts)
    gather = costs.keys_gathered(loads, counts, SHAPE, machine)
    ring = costs.keys_in_a_ring(loads, counts, SHAPE, machine)
    return Row(
        pattern, tokens, ranks, plan.assignment.name, loads.balance,
        float(loads.local.sum() / loads.total.sum()), keys.mean_bytes / 1e6, keys.most_bytes / 1e6,
        gather.mean_bytes / 1e6, chosen.strategy, chosen.stages, 1e3 * keys.total,
        queries, heads, 1e3 * gather.total, 1e3 * ring.total, 1e3 * keys.compute, plan_ms,
    )  # fmt: skip


def rows(patterns: list[str], tokens: list[int], ranks: list[int]) -> Iterator[Row]:
    """All combinations with at least a block for each rank."""
    for pattern in patterns:
        build, most = PATTERNS[pattern]
        for count in tokens:
            if count > most:
                continue
            mask = build(count)
            for number in ranks:
                if count >= number * _BLOCK:
                    yield simulated(pattern, count, number, mask)


def markdown(found: list[Row]) -> str:
    """The table; one pattern after the other."""
    head = (
        "| tokens | ranks | assignment | balance | local tiles | MB sent, mean | busiest | all-gather | chosen "
        "| ms, keys | queries | heads | all-gather | ring | compute alone | plan, ms |"
    )
    lines = []
    for pattern in dict.fromkeys(row.pattern for row in found):
        lines += [f"### {pattern}", "", head, "|" + "---|" * 16]
        for row in found:
            if row.pattern != pattern:
                continue
            queries, heads = ("-" if each is None else f"{each:.2f}" for each in (row.queries_ms, row.heads_ms))
            chosen = f"keys in {row.stages}" if row.strategy == "keys" else row.strategy
            lines.append(
                f"| {row.tokens:,} | {row.ranks:,} | {row.assignment} | {row.balance:.3f} | {100 * row.local:.1f} % "
                f"| {row.mean_mb:.2f} | {row.busiest_mb:.2f} | {row.gather_mb:.0f} | {chosen} | {row.keys_ms:.2f} "
                f"| {queries} | {heads} | {row.gather_ms:.2f} | {row.ring_ms:.2f} | {row.compute_ms:.2f} "
                f"| {row.plan_ms:.1f} |"
            )
        lines.append("")
    return "\n".join(lines)


def csv(found: list[Row]) -> str:
    """All numbers, a row a line."""
    names = [each.name for each in fields(Row)]
    lines = [",".join(names)]
    for row in found:
        values = asdict(row)
        lines.append(",".join('"' + values[name] + '"' if name in ("pattern", "assignment") else
                              "" if values[name] is None else f"{values[name]:.6g}" if isinstance(values[name], float)
                              else str(values[name]) for name in names))  # fmt: skip
    return "\n".join(lines) + "\n"


def plot(found: list[Row], path: Path) -> None:
    """For each pattern, at the most tokens that all its ranks have: modelled time, and bytes a rank, by ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    patterns = list(dict.fromkeys(row.pattern for row in found))
    figure, axes = pyplot.subplots(2, len(patterns), figsize=(3.2 * len(patterns), 6), squeeze=False)
    for column, pattern in enumerate(patterns):
        most = max(row.tokens for row in found if row.pattern == pattern)
        some = [row for row in found if row.pattern == pattern and row.tokens == most]
        ranks = [row.ranks for row in some]
        above, below = axes[:, column]
        above.set_title(f"{pattern}\n{most:,} tokens", fontsize=9)
        for name, values in (
            ("keys travel", [row.keys_ms for row in some]),
            ("queries travel", [row.queries_ms or np.nan for row in some]),
            ("heads travel", [row.heads_ms or np.nan for row in some]),
            ("all-gather", [row.gather_ms for row in some]),
            ("ring", [row.ring_ms for row in some]),
            ("compute alone", [row.compute_ms for row in some]),
        ):
            above.loglog(ranks, values, marker=".", label=name, linestyle=":" if "alone" in name else "-")
        below.loglog(ranks, [max(row.mean_mb, 1e-3) for row in some], marker=".", label="keys travel, mean rank")
        below.loglog(ranks, [max(row.busiest_mb, 1e-3) for row in some], marker=".", label="keys travel, busiest")
        below.loglog(ranks, [row.gather_mb for row in some], marker=".", label="all-gather, ring")
        below.set_xlabel("ranks")
    axes[0, 0].set_ylabel("forward and backward, ms, modelled")
    axes[1, 0].set_ylabel("MB a rank, forward")
    for each in axes[:, 0]:
        each.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
