"""Train runs with different attention, one after the other, to compare their losses.

<out>/<run>/                  each run, with the files of train.py
<out>/<run>/environment.json  the device, versions and commit of the session that completed it
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.lm import session
from experiments.lm.cases import Case
from experiments.lm.config import Config, configure
from experiments.lm.data.store import Store
from experiments.lm.train import saved_run
from experiments.training import run_folder
from experiments.training.atomic_files import write_json
from experiments.training.distributed import SINGLE
from experiments.training.reading import read_json
from experiments.training.trainer import Pause
from sparseflash.cli.pattern_text import parts

ENVIRONMENT = "environment.json"
NOT_CHOSEN = ("context", "pattern", "attention", "seed", "context_parallel")


def slug(pattern: str) -> str:
    for sign, word in {"|": "-or-", ",": "-then-", "/": "-and-"}.items():
        pattern = word.join(parts(pattern, sign))
    return re.sub(r"[^\w.]+", "-", pattern).strip("-.")


def name_of(case: Case) -> str:
    return f"{case.preset}-{case.context}-{slug(case.pattern)}-{case.attention}"


def config_of(case: Case, chosen: Mapping[str, Any]) -> Config:
    of_case = {"context": case.context, "pattern": case.pattern, "attention": case.attention}
    return configure(case.preset, {**chosen, **of_case})


def configs_of(
    cases: Iterable[Case],
    chosen: Mapping[str, Any],
    rates: Sequence[float] = (),
    seeds: Sequence[int] = (0,),
    tuned: Mapping[Case, float] | None = None,
) -> dict[str, Config]:
    """The settings of every run, by name.

    rates: peaks of the learning rate; none: the preset's. tuned: instead of them, the peak of each case.
    """
    found = {}
    for case in cases:
        if tuned is not None and case not in tuned:
            raise ValueError(f"--lr-from must have runs of every case; it has none of {name_of(case)}")
        of_case: Sequence[float | None] = [tuned[case]] if tuned is not None else rates or [None]
        for rate in of_case:
            for seed in seeds:
                name = name_of(case) + (f"-lr{rate:g}" if len(rates) > 1 else "")
                name += f"-seed{seed}" if len(seeds) > 1 else ""
                of_run = {"seed": seed} if rate is None else {"seed": seed, "lr": rate}
                found[name] = config_of(case, {**chosen, **of_run})
    return found


def rates_of(text: str | None) -> list[float]:
    """Learning rates from the command line.

    >>> rates_of("3e-4,6e-4"), rates_of(None)
    ([0.0003, 0.0006], [])
    """
    try:
        rates = [float(word) for word in text.split(",")] if text is not None else []
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < 1 for rate in rates) or len(set(rates)) < len(rates):
        raise ValueError(f"--lrs must be different numbers above 0 and below 1, 3e-4,6e-4 say; got {text!r}")
    return rates


def tuned_in(folder: Path, cases: Iterable[Case]) -> dict[Case, float]:
    """The learning rate with the lowest validation loss of each case, in a complete comparison."""
    runs = read_json(folder / "compare.json", "the result of a comparison", "runs")["runs"]
    found = {}
    for case in cases:
        own = [run for run in runs if (run["context"], run["pattern"], run["attention"]) == case[1:4]]
        if own:
            found[case] = float(min(own, key=lambda run: run["val_loss"])["lr"])
    return found


def train_all(
    configs: Mapping[str, Config], store: Store, out: Path, pause: Pause, facts: Mapping[str, str], console: Console
) -> bool:
    for name, config in configs.items():
        _check_same(out / name, config, store)
    trained = False
    for name, config in configs.items():
        folder = out / name
        if (folder / ENVIRONMENT).is_file():
            continue
        if trained and pause(0):
            return False
        metrics = session.train(
            config, store, folder, resume=run_folder.holds_run(folder), overwrite=False, pause=pause, ranks=SINGLE,
            console=console,
        )  # fmt: skip
        if metrics is None:
            return False
        write_json(folder / ENVIRONMENT, dict(facts))
        trained = True
    return True


def _check_same(folder: Path, config: Config, store: Store) -> None:
    if not run_folder.holds_run(folder):
        return
    saved = saved_run(folder)
    if saved.config != config or saved.hash != store.about["hash"]:
        raise ValueError(
            f"{folder} must hold a run with the settings and the text of this comparison; it has others: choose "
            "another --out"
        )
