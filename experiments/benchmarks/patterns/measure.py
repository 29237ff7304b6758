from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from experiments.benchmarks.patterns.catalogue import Pattern
from experiments.benchmarks.patterns.flex import Peer
from sparseflash import BlockMask

AT = 16_384  # tokens at which density, tiles and layers are counted
BLOCK = 128
NEVER, BY_DATA = "never", "-"


@dataclass(frozen=True)
class Row:
    name: str
    group: str
    rule: str
    density: float  # live scores over all scores, mean over heads
    tiles: float  # live, per head
    at: int
    layers: int | str  # until every key (causal: every earlier one) influences every query, or NEVER
    tokens: int  # at which building was timed
    seconds: float  # median
    megabytes: float  # 10^6 bytes
    eager: Peer | None = None  # None: not measured
    compiled: Peer | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Row:
        peers = {name: values[name] and Peer(**values[name]) for name in ("eager", "compiled")}
        return cls(**{**values, **peers})


def measure(pattern: Pattern, *, tokens: int | None = None, at: int = AT, block: int = BLOCK, repeats: int = 5) -> Row:
    tokens = pattern.tokens if tokens is None else tokens
    counted = pattern.build(at, block).canonical()
    seconds, built = build_time(pattern, tokens, block, repeats)
    return Row(
        pattern.name, pattern.group, pattern.rule,
        density=counted.density, tiles=tiles_a_head(counted), at=at,
        layers=BY_DATA if pattern.chosen else layers(pattern, at, block) or NEVER,
        tokens=tokens, seconds=seconds, megabytes=built.nbytes / 1e6,
    )  # fmt: skip


def build_time(pattern: Pattern, tokens: int, block: int, repeats: int) -> tuple[float, BlockMask]:
    pattern.build(tokens, block)
    times = []
    for _ in range(repeats):
        gc.collect()  # so that the garbage of other masks is not collected during this build
        start = time.perf_counter()
        mask = pattern.build(tokens, block)
        times.append(time.perf_counter() - start)
    return median(times), mask


def tiles_a_head(mask: BlockMask) -> float:
    counts = mask.indptr[:: mask.blocks[0]].diff()
    return float(counts[mask.pattern.long()].double().mean())


def layers(pattern: Pattern, tokens: int, block: int) -> int | None:
    from sparseflash.analysis import layers_to_full_reach

    stack = [pattern.build(tokens, block)] if pattern.stack is None else list(pattern.stack(tokens, block))
    needed: int | None = layers_to_full_reach(stack, causal=pattern.causal)
    return needed
