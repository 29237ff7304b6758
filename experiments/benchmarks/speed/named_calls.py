"""Calls with names, ours and those of peers, timed in turns: for benchmarks whose cases are not those of `speed`."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.speed.candidate import verdict_of
from experiments.benchmarks.timing import Timed, Timing, in_turns
from experiments.training.atomic_files import write_json, write_text
from experiments.training.environment import command_line, environment, in_a_line, installed_version


def timed_rows(
    case: str, runs: Mapping[str, Callable[[], object]], failures: Mapping[str, Exception], peers: Container[str],
    numbers: Callable[[str, Timing], dict[str, float]], device: torch.device, *, round_ms: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each of `runs`: its milliseconds, their spread and more `numbers`. A peer that fails, or has failed
    already, has the reason instead; a failure of ours is raised.
    """
    timed = {name: Timed(run, nullcontext) for name, run in runs.items() if name not in failures}
    timings = in_turns(timed, device, rounds=3, round_ms=round_ms)
    rows = []
    for name in runs:
        row: dict[str, Any] = {"case": case, "call": name}
        failed = failures[name] if name in failures else timings[name].failure
        if failed is None:
            timing = timings[name]
            row |= {"ms": timing.ms, "spread": timing.spread} | numbers(name, timing)
        elif name in peers:
            row["error"] = ": ".join(verdict_of(failed))
        else:
            raise failed
        rows.append(row)
    return rows


def write_rows(
    rows: list[dict[str, Any]], table: str, out: Path, name: str, device: torch.device, commit: str | None
) -> None:
    """Writes the rows and their table of the benchmark of this name, with what a reader needs to repeat it."""
    facts = environment(device, command_line(f"experiments.benchmarks.{name}"), commit)
    facts["flashinfer"] = installed_version("flashinfer-python")
    write_json(out / f"{name}.json", {**facts, "rows": rows})
    write_text(out / f"{name}.md", f"{in_a_line(facts)}\n\n{table}\n")
