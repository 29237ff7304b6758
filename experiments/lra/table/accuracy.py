"""The accuracies of finished runs, grouped by their settings."""

from __future__ import annotations

import json
import operator
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from experiments.lra.config import DEFAULTS, GENERATOR, VALIDATION
from experiments.lra.model.positions import OF_BRACKETS
from experiments.lra.tasks import TASKS
from experiments.lra.tasks.task import Options
from experiments.lra.token_labels import labels_of
from experiments.training.reading import read_json, reading
from experiments.training.run_log import read

# Settings that may differ within a group: the seed, and settings without effect on the weights.
_APART = ("seed", "device", "context_parallel", "checkpoint_every", "log_every")
# Settings without effect on a classifying run. Initial weights are compared by contents, not by path.
_NOTHING = ("objective", "hidden", "initial")
# The behaviour of older runs, from before the setting existed.
BEFORE = {
    "buckets": False, "attention": "sparseflash", "compiled": False, "recorded": False, "augment": "none",
    "auxiliary": 0.0, "keep": "last", "convolution": 0, "label_smoothing": 0.0, "cutmix": 0.0, "encoding": "tokens",
}  # fmt: skip


@dataclass(frozen=True)
class Accuracy:
    """Runs that differ only in their seed. Accuracies are on the test split, from 0 to 1."""

    task: str  # with the difficulty for Pathfinder's easier paths, which are different tasks
    attention: str
    mask: str
    runs: int
    values: tuple[float, ...]  # of the runs, in the order of their seeds
    mean: float
    std: float | None  # sample standard deviation; None for one run
    validation: float | None  # mean over runs, of the tested weights or else at the end; None without a log
    best_rule: str  # the best rule that avoids the task
    best_rule_accuracy: float
    seeds: str
    initial: str  # training of the initial weights in all earlier runs, with steps, or "nothing"
    positions: str
    helps: str  # what the arena's models and inputs do not have, apart from positions
    steps: int  # of the longest run
    parameters: int
    training_seconds: float  # mean over runs
    folder: str  # the folder of the runs, or their deepest common parent

    @property
    def variant(self) -> str:
        return self.mask if self.attention == "sparseflash" else self.attention


@dataclass(frozen=True)
class Run:
    path: Path
    metrics: dict[str, Any]
    validation: float | None

    @property
    def seed(self) -> int:
        return operator.index(self.metrics["config"]["seed"])


def collect(folder: Path) -> list[Accuracy]:
    """All finished classifying runs below a folder."""
    groups: dict[str, list[Run]] = {}
    for path in sorted(folder.rglob("metrics.json")):
        metrics = read_json(path, "the result of a run", "config")
        if metrics.get("objective", "classify") != "classify":
            continue
        run = Run(path, metrics, validated(path.with_name("log.jsonl"), metrics))
        with reading(path, "the result of a run"):
            # Each seed has a self-pretraining of its own, which arena.py puts beside the run.
            hidden = path.parent.with_name(f"{path.parent.name}-hidden") / path.name
            before = read_json(hidden, "the result of a self-pretraining", "config") if hidden.is_file() else None
            setting = key(metrics, before)
            accuracy([run], folder)  # reports a damaged result under its own name
        groups.setdefault(setting, []).append(run)
    for runs in groups.values():
        by_seed: dict[int, Path] = {}
        for run in runs:
            if run.seed in by_seed:
                raise ValueError(
                    f"{by_seed[run.seed].parent} and {run.path.parent} are the same run, with one seed: it must be "
                    "counted once; move one of them away, or name another folder"
                )
            by_seed[run.seed] = run.path
    found = [accuracy(runs, folder) for runs in groups.values()]
    return sorted(found, key=lambda each: (each.task, each.attention, each.mask, each.folder))


def key(metrics: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    """A short name for a run's settings and data, equal for runs that differ only by chance.

    before: metrics of the run's own self-pretraining. With them its settings are part of the key, otherwise the initial
    weights are.
    """
    config = {**BEFORE, **metrics["config"]}
    left_out = (*_APART, *_NOTHING, *(() if config["keep"] == "best" else VALIDATION))
    kept = {name: value for name, value in sorted(config.items()) if name not in left_out}
    kept |= {"generated": metrics["generated_data"], "test_examples": metrics["test_examples"]}
    if (data := metrics.get("data")) is not None:
        # A generator's settings describe the data of runs without --data.
        kept = {name: value for name, value in kept.items() if name not in GENERATOR} | {"data": data["hash"]}
    if (initial := metrics.get("initial")) is not None:
        kept["initial"] = initial["sha256"] if before is None else [key(before), before["config"]["hidden"]]
    return blake2b(json.dumps(kept).encode(), digest_size=3).hexdigest()


def accuracy(found: Iterable[Run], folder: Path) -> Accuracy:
    """One row for runs below `folder` with equal settings."""
    ordered = sorted(found, key=lambda run: run.seed)
    runs = [run.metrics for run in ordered]
    first = runs[0]
    values = [metrics["test_accuracy"] for metrics in runs]
    rules = {rule["rule"]: float(rule["accuracy"]) for rule in first["baselines"]}
    best = max(rules, key=rules.__getitem__)
    return Accuracy(
        task=name_of_task(first["config"]),
        attention=first["config"].get("attention", "sparseflash"),
        mask=first["mask"],
        runs=len(runs),
        values=tuple(values),
        mean=statistics.fmean(values),
        std=statistics.stdev(values) if len(values) > 1 else None,
        validation=mean_of(run.validation for run in ordered),
        best_rule=best,
        best_rule_accuracy=rules[best],
        seeds=" ".join(str(run.seed) for run in ordered),
        initial=described(first.get("initial"), first.get("data", {}).get("origin", "")),
        positions=first["config"].get("positions", DEFAULTS["positions"]),
        helps=helps({**BEFORE, **first["config"]}),
        steps=max(operator.index(metrics["steps"]) for metrics in runs),
        parameters=operator.index(first["parameters"]),
        training_seconds=statistics.fmean(metrics["training_seconds"] for metrics in runs),
        folder=Path(os.path.commonpath([run.path.parent.relative_to(folder) for run in ordered])).as_posix(),
    )


def name_of_task(config: dict[str, Any]) -> str:
    """The task, with its difficulty if it is not hard.

    >>> name_of_task({"task": "pathfinder32", "difficulty": "easy"})
    'pathfinder32, easy'
    """
    difficulty = config.get("difficulty", Options.difficulty)
    return str(config["task"]) + (f", {difficulty}" if difficulty != Options.difficulty else "")


def validated(log: Path, metrics: dict[str, Any]) -> float | None:
    """The validation accuracy of the tested weights, or else the last one of the log."""
    records = read(log)
    with reading(log, "the log of a run with its accuracies"):
        validations = [float(record["accuracy"]) for record in records if record["kind"] == "val"]
    found: float | None = metrics.get("validation_accuracy")
    return validations[-1] if found is None and validations else found


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None if no value is known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def helps(config: dict[str, Any]) -> str:
    """What the arena's models and inputs do not have, apart from positions, in words.

    >>> helps({"task": "pathfinder32", "background": "drop", "augment": "square", "auxiliary": 0.5})
    'background dropped, turned (square), pixel labels in training'
    """
    task, window = config["task"], config.get("convolution", 0)
    area = f"{window} tokens" if TASKS[task].side is None else f"{window} x {window} pixels"
    parts = {
        "brackets counted": config.get("positions") in OF_BRACKETS,
        "each argument's operator": config.get("positions") == "tree",
        "background dropped": config.get("background") == "drop",
        f"turned ({config['augment']})": config["augment"] not in ("none", "crops"),
        "mirrored and moved": config["augment"] == "crops",
        "squares of other images": config.get("cutmix", 0) > 0,
        "brightness as a number": config.get("encoding") == "brightness",
        f"{labels_of(task)} in training": config["auxiliary"] > 0,  # for initial weights see `described`
        f"convolutions of {area}": window > 0,
        "smoothed labels": config.get("label_smoothing", 0) > 0,
        "averaged weights": config.get("average", 0) > 0,
    }
    return ", ".join(name for name, holds in parts.items() if holds) or "none"


def described(initial: dict[str, Any] | None, origin: str = "") -> str:
    """The training of initial weights, in words, with the data if they differ from the run's own, `origin`.

    >>> described({"objective": "denoise", "steps": 5000})
    'denoise 5,000'
    >>> described({"objective": "classify", "steps": 9000, "seen": [{"origin": "pathfinder32-cl6, generated, seed 0"}]})
    'classify 9,000 (pathfinder32-cl6)'
    >>> described({"objective": "classify", "steps": 9, "seen": [{"origin": "a, seed 0"}, {"origin": "b, seed 0"}]})
    'classify 9 (a and b)'
    """
    if initial is None:
        return "nothing"
    seen = [name_of(each["origin"]) for each in initial.get("seen") or ()]
    before = initial.get("before", [])
    if len(seen) != len(before) + 1:  # older runs kept only the last run's costs, and the data of all runs
        before, seen = [], [" and ".join(dict.fromkeys(seen))]
    runs = zip([*before, initial], seen, strict=True)
    return ", ".join(stage(each) + (f" ({name})" if name not in ("", name_of(origin)) else "") for each, name in runs)


def name_of(origin: str) -> str:
    return origin.split(",")[0]


def stage(run: dict[str, Any]) -> str:
    steps = run.get("tested_step", run["steps"])
    return f"{run['objective']} {steps:,}" + (", labels of tokens" if run.get("token_labels") else "")
