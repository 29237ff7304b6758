from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from experiments.lra.baselines import baselines, majority
from experiments.lra.config import as_dict
from experiments.lra.denoise import frequency_baseline
from experiments.training.environment import command_line, device_name, versions
from experiments.training.run_log import Record

if TYPE_CHECKING:
    from experiments.lra.train import Run


def final_metrics(run: Run) -> dict[str, Any]:
    trained, test = run.log.of_kind("train"), run.log.of_kind("test")[-1]
    denoises = run.config.objective == "denoise"
    guessing = frequency_baseline(run.data, run.shape) if denoises else majority(run.data)
    rules = [guessing] if denoises else baselines(run.data)
    tenth = max(1, len(trained) // 10)
    return {
        "task": run.data.task.name,
        "generated_data": run.data.generated,
        "data": run.fingerprint,
        "objective": run.config.objective,
        "initial": run.before,
        "token_labels": run.has_seen_token_labels,
        "mask": run.config.mask,
        "attention": run.config.attention,
        "density": run.mask.density,
        "length": run.shape.length,
        "test_accuracy": test["accuracy"],
        "test_loss": test["loss"],
        "test_examples": test["examples"],
        "baselines": [asdict(rule) for rule in rules],
        "plateau_left_at": plateau_left_at(trained, guessing.loss),
        "first_loss": statistics.fmean(record["loss"] for record in trained[:tenth]),
        "last_loss": statistics.fmean(record["loss"] for record in trained[-tenth:]),
        "steps": run.state.step,
        "tested_step": run.tested_step,
        "validation_accuracy": validation_accuracy(run),  # None if not validated
        "training_seconds": run.state.seconds,
        "startup_seconds": run.state.startup_seconds,  # not training
        "tokens_per_s": statistics.median(record["tokens_per_s"] for record in trained),  # without padding
        "padding": statistics.fmean(record["padding"] for record in trained),
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "config": as_dict(run.config),
        "command": command_line("experiments.lra"),
        "device": device_name(run.device),
        "processes": run.ranks.count,
        "versions": versions(),
    }


def validation_accuracy(run: Run) -> float | None:
    if run.best is not None:
        return run.best.accuracy
    of_last = [record["accuracy"] for record in run.log.of_kind("val") if record["step"] == run.state.step]
    return of_last[-1] if of_last else None


def plateau_left_at(trained: list[Record], guessing: float) -> int | None:
    """The first step after which the loss, averaged over ten log lines, stays below 97 % of guessing by class
    frequencies; None if never.

    Many Pathfinder runs stay at guessing, some forever (Long Range Arena, issue 37).
    """
    losses = [record["loss"] for record in trained]
    left = None
    for i, record in enumerate(trained):
        recent = losses[max(0, i - 9) : i + 1]
        if statistics.fmean(recent) >= 0.97 * guessing:
            left = None
        elif left is None:
            left = record["step"]
    return left
