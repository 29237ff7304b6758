"""The rows of the arena's table: each task with each mask and each seed.

<out>/<preset>/<task>-<mask>/seed<n>/   a run, without its checkpoint when it is complete: at most 15 MiB
<out>/.../seed<n>-hidden/               its self-pretraining, if there is any: hidden tokens of the training inputs

Runs of the first seed come first, so that every row has a figure before any has two.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments.lra import seed_results
from experiments.lra.config import Config, configure
from experiments.lra.data.fingerprint import described
from experiments.lra.session import Session
from experiments.lra.table.accuracy import Accuracy
from experiments.lra.tasks import TASKS
from experiments.training import checkpoint

OF_ROWS = ("task", "mask", "seed", "objective", "hidden", "initial")
HIDDEN = {True: 0.5, False: 0.15}  # share of hidden tokens, of images and of other inputs (Amos, Berant and Gupta)


@dataclass(frozen=True)
class Row:
    """The runs differ in their seeds alone."""

    config: Config
    folder: Path
    pretraining: float | None = None  # minutes of predicting hidden tokens before each run; None: random weights

    def place(self, seed: int) -> Path:
        return self.folder / f"seed{seed}"

    def runs(self, seed: int) -> list[tuple[Config, Path]]:
        config, place = replace(self.config, seed=seed), self.place(seed)
        if self.pretraining is None:
            return [(config, place)]
        first = place.with_name(f"{place.name}-hidden")
        hidden = HIDDEN[TASKS[config.task].side is not None]
        before = replace(
            config, objective="denoise", hidden=hidden, minutes=self.pretraining, auxiliary=0.0, cutmix=0.0
        )
        return [(before, first), (replace(config, initial=str(first)), place)]


def rows_of(
    preset: str,
    tasks: Sequence[str],
    masks: Sequence[str],
    chosen: Mapping[str, Any],
    out: Path,
    pretraining: float | None = None,
) -> list[Row]:
    """The rows of a preset, with its settings changed by `chosen`. pretraining: minutes of it before each run."""
    folder = out / (preset if pretraining is None else f"{preset}-pretrained")
    rows = []
    for task in tasks:
        for mask in masks:
            config = configure(preset, {**chosen, "task": task, "mask": mask})
            name = "".join(letter if letter.isalnum() else "-" for letter in mask).strip("-")
            rows.append(Row(config, folder / f"{task}-{name}", pretraining))
    return rows


def train_all(rows: Sequence[Row], seeds: Sequence[int], sessions: Mapping[str, Session], until: float) -> bool:
    """Whether all runs are complete.

    until: the time.monotonic() at which the sessions pause. A run that a whole session of this length would hold is not
    begun in the rest of one, because its checkpoint is larger than its result.
    """
    whole = until - time.monotonic()
    before, beside = None, 0.0
    for config, place in in_order(rows, seeds):
        session = sessions[config.task]
        metrics, begun = seed_results.state(config, described(session.data), place)
        if metrics is None:
            expected = 60 * (config.minutes or 0) + beside
            if before is not None and until - time.monotonic() < expected <= whole:
                return False
            if before not in (None, config.task):
                torch._dynamo.reset()  # otherwise graphs of all tasks together pass the limit of torch.compile
            before, start = config.task, time.monotonic()
            metrics = session.train(config, place, begun)
            if metrics is None:
                return False
            beside = max(beside, time.monotonic() - start - metrics["training_seconds"])
        checkpoint.remove(place)
    return True


def in_order(rows: Sequence[Row], seeds: Sequence[int]) -> Iterator[tuple[Config, Path]]:
    return (run for seed in seeds for row in rows for run in row.runs(seed))


def table(found: Sequence[Accuracy]) -> list[list[str]]:
    lines = [[
        "task", "mask", "each seed", "mean", "validation", "positions", "extra help", "trained before", "minutes",
        "steps", "parameters", "best rule",
    ]]  # fmt: skip
    return lines + [line(each) for each in found]


def line(each: Accuracy) -> list[str]:
    spread = "" if each.std is None else f" ± {100 * each.std:.1f}"
    return [
        each.task,
        each.variant.replace("|", "\\|"),
        " ".join(f"{100 * value:.1f}" for value in each.values),
        f"{100 * each.mean:.1f}{spread}",
        "-" if each.validation is None else f"{100 * each.validation:.1f}",
        each.positions,
        each.helps,
        each.initial,
        f"{each.training_seconds / 60:.1f}",
        f"{each.steps:,}",
        f"{each.parameters:,}",
        f"{100 * each.best_rule_accuracy:.1f} ({each.best_rule})",
    ]
