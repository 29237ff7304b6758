from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer

from experiments.benchmarks.harness import table
from experiments.benchmarks.harness.ways import Way, failure_of, reason, without_frames
from experiments.benchmarks.interpreter import run_kernels_on
from experiments.benchmarks.timing import Timed, Timing, in_turns, of_single_calls, recorded
from experiments.measurements import Measurement, Run, current_run, read, write
from experiments.training.distributed import find_device
from experiments.training.environment import command_line


class Bench:
    def __init__(
        self, name: str, run: Run, out: Path, device: torch.device, *, rounds: int = 3, round_ms: float = 60.0
    ) -> None:
        """out: a .jsonl file, or the folder for `name`.jsonl. On a CPU each turn is one call."""
        self.name, self.run, self.device, self.rounds = name, run, device, rounds
        self.path = out if out.suffix == ".jsonl" else out / f"{name}.jsonl"
        self.round_ms = round_ms if device.type == "cuda" else 0.0
        self.measurements: list[Measurement] = []
        self.timed: dict[str, Timed] = {}

    @classmethod
    def start(
        cls, name: str, device: str, commit: str | None, out: Path, *, module: str | None = None,
        program: Sequence[str] = ("python",), seed: int | None = None, packages: Sequence[str] = (), **options: Any,
    ) -> Bench:  # fmt: skip
        run_kernels_on(device.partition(":")[0])
        try:
            place = find_device(device)
        except ValueError as failure:
            raise typer.BadParameter(str(failure)) from None
        command = command_line(f"experiments.benchmarks.{module or name}", program=program)
        run = current_run(place, command, commit=commit, seed=seed, packages=packages)
        if os.environ.get("RANK", "0") == "0":
            print(table.about(run), flush=True)
        return cls(name, run, out, place, **options)

    def resume(self) -> None:
        """Takes over what --out has; refuses a file of another device, driver, commit or versions."""
        if not self.path.exists():
            return
        run, found = read(self.path)
        for what in ("device", "driver", "commit", "versions"):
            then, now = getattr(run, what), getattr(self.run, what)
            if then != now:
                raise typer.BadParameter(
                    f"--out has measurements of another {what}, {then}; this one is {now}: name another file."
                )
        self.measurements = [replace(each, run=None) for each in found]

    def add(
        self, path: str, value: float | None, unit: str, *, spread: float | None = None, failure: str = "",
        **settings: Any,
    ) -> None:  # fmt: skip
        """Records a value, or the reason why it is missing. path: CASE.../PASS/WAY."""
        made = Measurement(f"{self.name}/{path}", value, spread, unit, settings, failure=failure)
        self.measurements.append(made)
        print(f"{path}: {failure or f'{value:.4g} {unit}'}", flush=True)

    def time(self, case: str, ways: Mapping[str, Way], *, host_calls: int | None = None) -> dict[str, Timing]:
        """Times ways in turns and records milliseconds of the device.

        ways: by PASS/WAY, or by WAY. host_calls: microseconds of the host instead, in loops of this many calls.
        """
        failures: dict[str, Exception] = {}
        timed = self.timed = {}
        for name, way in ways.items():
            try:
                if way.like is not None and (failure := failure_of(way.call, ways[way.like].call)):
                    raise failure
                call = recorded(way.call) if way.recorded and self.device.type == "cuda" else way.call
                timed[name] = Timed(call, way.context)
            except Exception as failure:
                failures[name] = without_frames(failure) if way.peer else failure
        if host_calls is None:
            timings = in_turns(timed, self.device, rounds=self.rounds, round_ms=self.round_ms)
        else:
            timings = of_single_calls(timed, self.device, rounds=self.rounds, count=host_calls)
        unit, scale = ("ms", 1.0) if host_calls is None else ("us", 1e3)
        for name, way in ways.items():
            failed = failures.get(name) or timings[name].failure
            if failed is None:
                timing = timings[name]
                spread = timing.spread if len(timing.rounds) > 1 else None
                self.add(f"{case}/{name}", scale * timing.ms, unit, spread=spread, **way.settings)
            elif way.peer:
                self.add(f"{case}/{name}", None, unit, failure=reason(failed), **way.settings)
            else:
                raise failed
        self.save()
        return timings

    def save(self) -> None:
        write(self.path, self.run, self.measurements)

    def finish(self, over: str = table.OURS) -> None:
        """Writes the record and prints its table, with ratios to the way `over`."""
        self.save()
        print(f"\n{table.markdown(self.measurements, over)}\n\nWritten: {self.path}", flush=True)
