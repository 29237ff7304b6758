"""One run for each of several seeds, in folders of their own: how much of a result is luck.

<out>/seeds.json    the seeds, the settings and the data of all runs
<out>/seed0/        a run; see train.py
<out>/seed1/
<out>/summary.json  all test accuracies, their mean and standard deviation, when every run is complete
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.lra.config import FREE_ON_RESUME, Config, as_dict, from_saved, resumed
from experiments.lra.files import write_json
from experiments.lra.identity import check_same, described
from experiments.lra.ranks import ALONE, Ranks
from experiments.lra.resume import check_unused, discard
from experiments.lra.tasks import Data

SERIES = "seeds.json"
SUMMARY = "summary.json"

Metrics = dict[str, Any]  # of one run


def parsed(text: str) -> tuple[int, ...]:
    """Seeds from the command line.

    >>> parsed("0,1,2")
    (0, 1, 2)
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"--seeds must be whole numbers with commas between them, 0,1,2 say; got {text!r}")
    seeds = tuple(int(word) for word in words)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds must be different; got {text!r}")
    return seeds


def saved(folder: Path) -> tuple[int, ...] | None:
    """The seeds of the series in a folder; None where there is none."""
    path = folder / SERIES
    return tuple(json.loads(path.read_text())["seeds"]) if path.is_file() else None


def begin(
    folder: Path, config: Config, seeds: Sequence[int], data: Path, *, resume: bool = False, overwrite: bool = False
) -> None:
    """Write down what the series is, so that --resume needs its folder alone.

    Raises FileExistsError where the folder holds runs and neither `resume` nor `overwrite` is set.
    """
    held = [name for name in (SERIES, "config.json") if (folder / name).exists()]
    if held and not (resume or overwrite):
        raise FileExistsError(
            f"{folder} holds {'runs' if SERIES in held else 'a run'}; go on by --resume, replace by --overwrite, or "
            "choose another folder with --out"
        )
    if "config.json" in held:
        raise FileExistsError(f"{folder} holds a single run; choose another folder with --out")
    if not resume:  # what is left of older runs a later --resume would take for this series'
        older = [place for place in folder.glob("seed*") if place.name.removeprefix("seed").isdecimal()]
        if overwrite and config.initial is not None and folder.resolve() in Path(config.initial).resolve().parents:
            raise ValueError(f"--initial {config.initial} lies in {folder}, which --overwrite deletes: move it away")
        for place in older:
            if not overwrite:
                check_unused(place)
            discard(place)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).unlink(missing_ok=True)
    write_json(folder / SERIES, {"seeds": list(seeds), "config": as_dict(config), "data": {"folder": str(data)}})


def run(
    config: Config,
    seeds: Sequence[int],
    data: Data,
    folder: Path,
    train: Callable[[Config, Path, bool], Metrics | None],
    *,
    resume: bool,
    ranks: Ranks = ALONE,
) -> Metrics | None:
    """Train with each seed that is not done yet, and write and return the summary.

    train: trains with these settings in this folder, going on with the run there if the last argument says so;
        returns its metrics, or None where it paused. Then the series is paused too.
    """
    done = []
    used = described(data)
    for seed in seeds:
        own, place = replace(config, seed=seed), folder / f"seed{seed}"
        metrics, begun = ranks.from_first(partial(state, own, used, place)) if resume else (None, False)
        if metrics is None:
            metrics = train(own, place, begun)
        if metrics is None:
            return None
        done.append(metrics)
    summary = summed_up(done)
    ranks.from_first(partial(write_json, folder / SUMMARY, summary))
    return summary


def check_none(folder: Path) -> None:
    """Raises FileExistsError where the folder holds a series, which a single run in it would hide."""
    if (folder / SERIES).exists():
        raise FileExistsError(f"{folder} holds runs with several seeds; choose another folder with --out")


def state(config: Config, data: dict[str, Any], folder: Path) -> tuple[Metrics | None, bool]:
    """The metrics of a complete run, None where it is not or is now to be longer; and whether there is a run at all.

    data: as `identity.described` has it. Raises ValueError where it is a run of other settings or on other data.
    """
    saved = folder / "config.json"
    if not saved.exists():
        return None, False
    chosen = {name: value for name, value in as_dict(config).items() if name not in FREE_ON_RESUME}
    began = json.loads(saved.read_text())
    resumed(from_saved(began["config"]), chosen)
    check_same(began["data"], data)
    path = folder / "metrics.json"
    if not path.is_file():
        return None, True
    metrics: Metrics = json.loads(path.read_text())
    used = metrics["config"]
    return metrics if (used["steps"], used["minutes"]) == (config.steps, config.minutes) else None, True


def summed_up(runs: Sequence[Metrics]) -> Metrics:
    """What the runs of one setting have in common, and the spread of their results.

    The standard deviation is that of a sample (n - 1); None for one run.
    """
    first = runs[0]
    same = (
        "task",
        "generated_data",
        "data",
        "mask",
        "attention",
        "density",
        "length",
        "test_examples",
        "baselines",
        "parameters",
    )
    of_a_run = ("test_accuracy", "test_loss", "plateau_left_at", "steps", "training_seconds", "tokens_per_s", "device")
    since = ("tested_step", "validation_accuracy")  # which finished runs may be from before
    accuracies = [metrics["test_accuracy"] for metrics in runs]
    return {
        **{name: first.get(name) for name in same},
        "test_accuracy_mean": statistics.fmean(accuracies),
        "test_accuracy_std": statistics.stdev(accuracies) if len(runs) > 1 else None,
        "runs": [
            {
                "seed": each["config"]["seed"],
                **{name: each[name] for name in of_a_run},
                **{name: each.get(name) for name in since},
            }
            for each in runs
        ],
        "pixel_labels": first.get("pixel_labels", False),
        "config": {name: value for name, value in first["config"].items() if name != "seed"},
        "versions": first["versions"],
    }
