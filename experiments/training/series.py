"""Runs that differ only in their seed, each in its own folder.

<out>/seeds.json    the seeds, the settings and the data of all runs
<out>/seed0/        a run
<out>/seed1/
<out>/summary.json  all results, their mean and standard deviation, when every run is complete
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.training.atomic_files import write_json
from experiments.training.distributed import SINGLE, Ranks
from experiments.training.reading import read_json
from experiments.training.run_folder import SETTINGS, check_replaceable, discard

SERIES = "seeds.json"
SUMMARY = "summary.json"

Metrics = dict[str, Any]


def parsed(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"--seeds must be whole numbers with commas between them, 0,1,2 say; got {text!r}")
    seeds = tuple(int(word) for word in words)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds must be different; got {text!r}")
    return seeds


def saved(folder: Path) -> tuple[int, ...] | None:
    path = folder / SERIES
    return tuple(read_json(path, "the seeds of a series of runs", "seeds")["seeds"]) if path.is_file() else None


def begin(
    folder: Path,
    seeds: Sequence[int],
    settings: dict[str, Any],
    *,
    initial: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """So that --resume needs only the folder."""
    held = [name for name in (SERIES, SETTINGS) if (folder / name).exists()]
    if held and not (resume or overwrite):
        raise FileExistsError(
            f"{folder} holds {'runs' if SERIES in held else 'a run'}; go on by --resume, replace by --overwrite, or "
            "choose another folder with --out"
        )
    if SETTINGS in held:
        raise FileExistsError(f"{folder} holds a single run; choose another folder with --out")
    if not resume:  # a later --resume would adopt older runs
        older = [place for place in folder.glob("seed*") if place.name.removeprefix("seed").isdecimal()]
        for place in older:
            check_replaceable(place, overwrite=overwrite, initial=initial)
        for place in older:
            discard(place)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).unlink(missing_ok=True)
    write_json(folder / SERIES, {"seeds": list(seeds), **settings})


def run(
    seeds: Sequence[int],
    folder: Path,
    train: Callable[[int, Path, bool], Metrics | None],
    state: Callable[[int, Path], tuple[Metrics | None, bool]],
    summary: Callable[[Sequence[Metrics]], Metrics],
    *,
    resume: bool,
    ranks: Ranks = SINGLE,
) -> Metrics | None:
    """Train with each unfinished seed; writes and returns the summary.

    train: with a seed, a folder, and whether to resume; returns metrics, or None if paused. state: the metrics of a
    complete run (else None), and whether a run exists.
    """
    done = []
    for seed in seeds:
        place = folder / f"seed{seed}"
        metrics, begun = ranks.on_first(partial(state, seed, place)) if resume else (None, False)
        if metrics is None:
            metrics = train(seed, place, begun)
        if metrics is None:
            return None
        done.append(metrics)
    found = summary(done)
    ranks.on_first(partial(write_json, folder / SUMMARY, found))
    return found


def check_none(folder: Path) -> None:
    if (folder / SERIES).exists():
        raise FileExistsError(f"{folder} holds runs with several seeds; choose another folder with --out")
