"""The longest mask that FlexAttention's `create_block_mask` can build here, in a process that a limit may stop.

The process doubles the length until a build takes too long or too much memory, and prints a line of JSON for each.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODES = ("eager", "compiled")
SHORTEST = 1024  # tokens
LONGEST = 1 << 20
# Seconds for importing PyTorch and compiling, in addition to the builds.
_STARTING_SECONDS = 180


@dataclass(frozen=True)
class Peer:
    tokens: int
    seconds: float
    megabytes: float  # 10^6 bytes, peak of the process minus its peak while building a mask of SHORTEST tokens
    stopped: str  # what ended the search: "time", "memory", "longest", or an error in one line


def longest(name: str, mode: str, *, block: int, seconds: float, gigabytes: float, most: int = LONGEST) -> Peer | None:
    asked = {"name": name, "mode": mode, "block": block, "seconds": seconds, "gigabytes": gigabytes, "most": most}
    command = [sys.executable, "-m", "experiments.benchmarks.patterns.flex", json.dumps(asked)]
    return read(*output_within(command, _STARTING_SECONDS + 4 * seconds))


def output_within(command: Sequence[str], seconds: float) -> tuple[str, str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        printed, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0], "time"
    if process.returncode == 0:
        return printed, ""
    lines = errors.strip().splitlines()
    return printed, lines[-1] if lines else f"exit status {process.returncode}"


def read(printed: str, ended: str) -> Peer | None:
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{") and line.endswith("}")]
    builds = [line for line in lines if "tokens" in line]
    if not builds:
        return None
    stopped = next((line["stopped"] for line in lines if "stopped" in line), ended)
    return Peer(builds[-1]["tokens"], builds[-1]["seconds"], builds[-1]["megabytes"], stopped)


def search(
    build: Callable[[int], Any], report: Callable[[dict[str, Any]], None], *, seconds: float, most: int = LONGEST
) -> None:
    build(SHORTEST)  # imports, compilers and thread pools count neither as time nor as memory of a mask
    before = peak_bytes()
    tokens = SHORTEST
    while tokens <= most:
        try:
            # Twice, because the first build at a length may compile again.
            took = min(timed(build, tokens), timed(build, tokens))
        except (MemoryError, RuntimeError) as failure:
            if isinstance(failure, MemoryError) or "memory" in str(failure):
                return report({"stopped": "memory"})
            raise
        if took > seconds:
            return report({"stopped": "time"})
        report({"tokens": tokens, "seconds": took, "megabytes": (peak_bytes() - before) / 1e6})
        if 4 * took > seconds:  # at twice the length the rule is evaluated for four times as many scores
            return report({"stopped": "time"})
        tokens *= 2
    return report({"stopped": "longest"})


def timed(build: Callable[[int], Any], tokens: int) -> float:
    start = time.perf_counter()
    build(tokens)
    return time.perf_counter() - start


def peak_bytes() -> int:
    """The largest amount of memory that this process has held, on Linux.

    Not `ru_maxrss`: that keeps the peak of the process that started this one.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main(name: str, mode: str, block: int, seconds: float, gigabytes: float, most: int) -> None:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    from experiments.benchmarks.patterns.catalogue import select

    (pattern,) = select([name])
    live = pattern.live
    if live is None:
        raise SystemExit(f"{name} has no formula for FlexAttention.")
    heads = pattern.build(SHORTEST, block).shape[1]
    create = torch.compile(create_block_mask) if mode == "compiled" else create_block_mask

    def build(tokens: int) -> object:
        mask_mod = lambda b, h, q, k: live(h, q, k, tokens, block)  # noqa: E731
        return create(mask_mod, None, heads if heads > 1 else None, tokens, tokens, device="cpu", BLOCK_SIZE=block)

    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    allowed = in_use + int(gigabytes * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    search(build, lambda line: print(json.dumps(line), flush=True), seconds=seconds, most=most)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
