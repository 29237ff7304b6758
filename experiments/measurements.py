"""Measurements as data: one file a run, the run in its first line and a measurement in each further line.

    run = current_run(device, command_line("experiments.benchmarks.calls"))
    write("calls.jsonl", run, [Measurement("calls/prepared/sparseflash", 21.4, 0.03, "us")])
    run, measurements = read("calls.jsonl")
    add_seed("recall.jsonl", run, [Measurement("recall/256/right-answers/dense", 98.2, None, "%")])

Names are stable: BENCHMARK/CASE.../PASS/WAY, with the implementation as the last part.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

PARTS = 2  # of a name, at least: benchmark and way
SPREADS = ("turns", "seeds")
# The facts of `environment` that are not versions.
_OWN = ("run", "device", "driver", "date", "commit", "command")


@dataclass(frozen=True)
class Run:
    device: str
    driver: str
    versions: dict[str, str]
    commit: str
    date: str
    command: str
    seed: int | None = None
    helped: tuple[str, ...] = ()  # what the figures depend on besides the command, such as a tuning file


@dataclass(frozen=True)
class Measurement:
    """One figure of one run.

    spread is relative: (largest - smallest) / median of the turns or, with spread_of="seeds", the standard deviation
    over the mean of `seeds` runs. value is None where the measurement failed, and `failure` says why.
    """

    name: str
    value: float | None
    spread: float | None
    unit: str
    settings: dict[str, Any] = field(default_factory=dict)
    spread_of: str = "turns"
    seeds: int | None = None
    failure: str = ""
    run: Run | None = field(default=None, compare=False, repr=False)  # known after `read`

    def __post_init__(self) -> None:
        parts = self.name.split("/")
        if len(parts) < PARTS or not all(parts):
            raise ValueError(f"the name of a measurement must be BENCHMARK/CASE.../WAY; got {self.name!r}")
        if (self.value is None) != bool(self.failure):
            raise ValueError(f"{self.name} must have either a value or a failure; got {self.value}, {self.failure!r}")
        for what, number in (("value", self.value), ("spread", self.spread)):
            if number is not None and not math.isfinite(number):
                raise ValueError(f"the {what} of {self.name} must be finite; got {number}")
        if self.spread_of not in SPREADS:
            raise ValueError(f"spread_of must be one of {', '.join(SPREADS)}; got {self.spread_of!r}")
        if (self.spread_of == "seeds") != (self.seeds is not None):
            raise ValueError(f"seeds must be given with spread_of='seeds' and only then; got {self.seeds}")

    @property
    def way(self) -> str:
        return self.name.rpartition("/")[2]


class Ratio(NamedTuple):
    """A peer's figure over ours, and the relative spread of this ratio; None if one of the spreads is not known."""

    value: float
    spread: float | None

    @property
    def noise(self) -> float | None:
        """By how much the ratio may be too large or too small: it times its spread."""
        return None if self.spread is None else self.value * self.spread

    @property
    def above_noise(self) -> bool:
        """Whether the ratio is above 1 by more than its noise; False if that is not known."""
        return self.noise is not None and self.value - self.noise > 1


def current_run(
    device: torch.device,
    command: str,
    *,
    commit: str | None = None,
    seed: int | None = None,
    helped: Iterable[str] = (),
    packages: Sequence[str] = (),
) -> Run:
    """The run of this process. commit: by default git's. packages: further ones whose versions matter."""
    from experiments.training.environment import environment, installed_version  # readers of a file need no PyTorch

    further = {name: installed_version(name) for name in packages}
    return run_of(environment(device, command, commit) | further, seed=seed, helped=helped)


def run_of(facts: Mapping[str, str], *, seed: int | None = None, helped: Iterable[str] = ()) -> Run:
    import sparseflash

    versions = {name: fact for name, fact in facts.items() if name not in _OWN}
    versions.setdefault("sparseflash", sparseflash.__version__)
    return Run(
        device=facts["device"], driver=facts["driver"], versions=versions, commit=facts["commit"], date=facts["date"],
        command=facts["command"], seed=seed, helped=tuple(helped),
    )  # fmt: skip


def write(path: Path | str, run: Run, measurements: Iterable[Measurement]) -> None:
    seen: set[str] = set()
    lines = [json.dumps({"run": _plain(run)})]
    for measurement in measurements:
        if measurement.name in seen:
            raise ValueError(f"each name must occur once in {Path(path).name}; got {measurement.name} again")
        if measurement.run is not None and measurement.run != run:
            raise ValueError(f"{measurement.name} must be of the run that is written; got one of {_when(measurement)}")
        seen.add(measurement.name)
        lines.append(json.dumps(_plain(measurement), allow_nan=False))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def add_seed(path: Path | str, run: Run, measurements: Iterable[Measurement]) -> list[Measurement]:
    """Adds the measurements of one seed to a file, and returns all that it holds now.

    A value becomes the mean over all seeds in the file, and its spread their standard deviation over the mean; the
    settings `runs` and `run_seeds` keep the single values.
    """
    path = Path(path)
    if run.seed is None:
        raise ValueError("a run that is added to others must have a seed; got None")
    found: dict[str, Measurement] = {}
    first = run
    if path.exists():
        first, old = read(path)
        for what in ("device", "driver", "commit", "versions"):
            if getattr(first, what) != getattr(run, what):
                raise ValueError(
                    f"a run that is added to {path.name} must be of its {what}, {getattr(first, what)}; got "
                    f"{getattr(run, what)}: write another file"
                )
        found = {each.name: each for each in old}
    for each in measurements:
        before = found.get(each.name)
        found[each.name] = _with_seed(each, before, run.seed)
    seeds = {seed for each in found.values() for seed in each.settings.get("run_seeds", ())}
    commands = dict.fromkeys([*first.command.split("; "), run.command])
    joined = replace(first, seed=run.seed if len(seeds) == 1 else None, command="; ".join(commands))
    every = [replace(each, run=joined) for each in found.values()]
    write(path, joined, every)
    return every


def _with_seed(new: Measurement, before: Measurement | None, seed: int) -> Measurement:
    if new.value is None:
        raise ValueError(f"{new.name} must have a value to be added to a mean; it failed: {new.failure}")
    runs, seeds = [new.value], [seed]
    if before is not None:
        if seed in before.settings.get("run_seeds", ()):
            raise ValueError(f"each seed must be added once; {before.name} has seed {seed}: write another file")
        runs, seeds = [*before.settings["runs"], *runs], [*before.settings["run_seeds"], seed]
    settings = new.settings | {"runs": runs, "run_seeds": seeds}
    if len(runs) == 1:
        return replace(new, settings=settings)
    value = mean(runs)
    spread = stdev(runs) / abs(value) if value else None
    return Measurement(new.name, value, spread, new.unit, settings, spread_of="seeds", seeds=len(runs))


def slug(text: str) -> str:
    """A text as a part of a name: lower case, with hyphens.

    >>> slug("1 x 65,536 tokens, 32:8 heads")
    '1-x-65536-tokens-32-8-heads'
    """
    return re.sub(r"[^a-z0-9.+]+", "-", text.lower().replace(",", "")).strip("-")


def read(path: Path | str) -> tuple[Run, list[Measurement]]:
    """The run of a file and its measurements, in the file's order."""
    path = Path(path)
    first, *rest = [json.loads(line) for line in path.read_text().splitlines() if line] or [{}]
    if set(first) != {"run"}:
        raise ValueError(f'the first line of {path.name} must be {{"run": ...}}; got {sorted(first)}')
    if [line for line in rest if "run" in line]:
        raise ValueError(f"{path.name} must hold one run; got more than one")
    run = Run(**first["run"] | {"helped": tuple(first["run"].get("helped", ()))})
    return run, [Measurement(**line, run=run) for line in rest]


def ratio(measurements: Iterable[Measurement], peer: str, ours: str) -> Ratio:
    """The peer's value over ours, by their names: above 1 ours is faster where the values are times.

    Defined only within one run: clock rates, drivers and versions differ between runs.
    """
    by_name: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        by_name.setdefault(measurement.name, []).append(measurement)
    for name in (peer, ours):
        if len(by_name.get(name, [])) != 1:
            raise ValueError(f"a ratio must be of names that were measured once; got {name}, {_found(by_name, name)}")
    first, second = by_name[peer][0], by_name[ours][0]
    if first.run != second.run:
        raise ValueError(
            f"a ratio must be of one run; got {peer} of {_when(first)} and {ours} of {_when(second)}: "
            f"measure both in one command"
        )
    if first.unit != second.unit:
        raise ValueError(f"a ratio must be of one unit; got {peer} in {first.unit} and {ours} in {second.unit}")
    if first.value is None or second.value is None:
        failed = first if first.value is None else second
        raise ValueError(f"a ratio must be of measured values; got {failed.name}, which failed: {failed.failure}")
    is_known = first.spread is not None and second.spread is not None
    return Ratio(first.value / second.value, first.spread + second.spread if is_known else None)  # type: ignore[operator]


def _found(by_name: Mapping[str, Sequence[Measurement]], name: str) -> str:
    return f"measured {len(by_name[name])} times" if name in by_name else "which is not there"


def _when(measurement: Measurement) -> str:
    run = measurement.run
    return "a run not yet written" if run is None else f"{run.date} on {run.device}"


def _plain(data: Run | Measurement) -> dict[str, Any]:
    made = {one.name: getattr(data, one.name) for one in fields(data) if one.name != "run"}
    for name, default in (("settings", {}), ("spread_of", "turns"), ("seeds", None), ("failure", "")):
        if name in made and made[name] == default:
            del made[name]
    return made
