from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.lra.config import FREE_ON_RESUME, Config, as_dict, from_saved, resumed
from experiments.training.fingerprint import check_same_data
from experiments.training.reading import read_json
from experiments.training.run_folder import SETTINGS, settings_as
from experiments.training.series import Metrics


def settings(config: Config, data: Path) -> dict[str, Any]:
    return {"config": as_dict(config), "data": {"folder": str(data)}}


def state(config: Config, data: dict[str, Any], folder: Path) -> tuple[Metrics | None, bool]:
    saved = folder / SETTINGS
    if not saved.exists():
        return None, False
    chosen = {name: value for name, value in as_dict(config).items() if name not in FREE_ON_RESUME}
    began, its_data = settings_as(saved, lambda found: (from_saved(found["config"]), found["data"]))
    resumed(began, chosen)
    check_same_data(its_data, data)
    path = folder / "metrics.json"
    if not path.is_file():
        return None, True
    metrics: Metrics = read_json(path, "the result of a run", "config")
    used = metrics["config"]
    return metrics if (used["steps"], used["minutes"]) == (config.steps, config.minutes) else None, True


def summary(runs: Sequence[Metrics]) -> Metrics:
    """Shared values, and the spread of results: the sample's (n - 1), None for one run."""
    first = runs[0]
    same = (
        "task", "generated_data", "data", "mask", "attention", "density", "length", "test_examples", "baselines",
        "parameters",
    )  # fmt: skip
    of_a_run = ("test_accuracy", "test_loss", "plateau_left_at", "steps", "training_seconds", "tokens_per_s", "device")
    later = ("tested_step", "validation_accuracy")
    accuracies = [metrics["test_accuracy"] for metrics in runs]
    return {
        **{name: first.get(name) for name in same},
        "test_accuracy_mean": statistics.fmean(accuracies),
        "test_accuracy_std": statistics.stdev(accuracies) if len(runs) > 1 else None,
        "runs": [
            {
                "seed": each["config"]["seed"],
                **{name: each[name] for name in of_a_run},
                **{name: each.get(name) for name in later},
            }
            for each in runs
        ],
        "token_labels": first.get("token_labels", False),
        "config": {name: value for name, value in first["config"].items() if name != "seed"},
        "versions": first["versions"],
    }
