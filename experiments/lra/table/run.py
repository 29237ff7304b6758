"""The whole command: measure, write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from experiments.lra.table import report
from experiments.lra.table.measure import NOT_RUN, Row, measure, new_row
from experiments.lra.table.plot import draw
from experiments.lra.table.shapes import FIVE, REFERENCE, VARIANTS, settings
from experiments.training.environment import environment, in_a_line

PRESETS = ("lra", "nystromformer", "modern")  # those with all five tasks


@dataclass(frozen=True)
class Options:
    device: torch.device
    tasks: tuple[str, ...] = FIVE
    variants: tuple[str, ...] = tuple(VARIANTS)
    preset: str = "lra"
    batch: int | None = None  # examples per step, instead of the preset's
    block: int | None = None  # tokens along one side of the masks' tiles, likewise
    rounds: int = 5
    steps: int = 8  # per round
    minutes: float = 8.0  # no task starts after this time
    compiled: bool = False  # compile the parts around attention with torch.compile
    recorded: bool = True  # on a GPU, run steps as CUDA graphs

    def __post_init__(self) -> None:
        for name, allowed in (("tasks", FIVE), ("variants", tuple(VARIANTS)), ("preset", PRESETS)):
            chosen = getattr(self, name)
            for each in (chosen,) if isinstance(chosen, str) else chosen:
                if each not in allowed:
                    raise ValueError(f"{name} must be from {', '.join(allowed)}; got {each!r}")
        if REFERENCE not in self.variants:
            raise ValueError(f"variants must include {REFERENCE}, which the others are compared with")
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")


def run(options: Options, out: Path, command: str, commit: str | None, say: Callable[[str], None]) -> report.Results:
    """Files are written after every task, so that an interrupted command keeps its measurements."""
    facts = environment(options.device, command, commit)
    recorded = options.recorded and options.device.type == "cuda"
    how = "as CUDA graphs" if recorded else "started by the host, kernel by kernel"
    more = ", code around attention compiled" if options.compiled else ""
    facts["steps"] = f"{how}{more}, for all variants"
    if options.device.type == "cpu":
        facts["note"] = "everything is shrunk: a test of the command, and no measurement"
    say(in_a_line(facts))
    results = report.Results(facts)
    begin = time.monotonic()
    for task in options.tasks:
        results.times += _task(task, options, late=time.monotonic() - begin > 60 * options.minutes, say=say)
        report.write(results, out)
    draw(results, out / "table.png")
    return results


def _task(task: str, options: Options, *, late: bool, say: Callable[[str], None]) -> Sequence[Row]:
    small = options.device.type == "cpu"
    configs = {
        variant: replace(
            settings(task, variant, options.preset, small=small, batch=options.batch, block=options.block),
            compiled=options.compiled,
            recorded=options.recorded,
        )
        for variant in options.variants
    }
    if not late:
        return measure(configs, options.device, rounds=options.rounds, steps=options.steps, say=say)
    rows = [new_row(variant, config) for variant, config in configs.items()]
    for row in rows:
        row.status, row.reason = NOT_RUN, f"the limit of {options.minutes:g} minutes was reached"
    return rows
