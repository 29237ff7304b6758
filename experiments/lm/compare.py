"""Train runs with different attention, one after the other, to compare their losses.

<out>/<run>/                  each run, with the files of train.py
<out>/<run>/environment.json  the device, versions and commit of the session that completed it

The same command resumes a paused comparison.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
from experiments.training.trainer import Pause
from sparseflash.cli.pattern_text import parts

ENVIRONMENT = "environment.json"
# Settings given by a case, and settings for several processes.
NOT_CHOSEN = ("context", "pattern", "attention", "context_parallel")


def slug(pattern: str) -> str:
    for sign, word in {"|": "-or-", ",": "-then-", "/": "-and-"}.items():
        pattern = word.join(parts(pattern, sign))
    return re.sub(r"[^\w.]+", "-", pattern).strip("-.")


def name_of(case: Case) -> str:
    return f"{case.preset}-{case.context}-{slug(case.pattern)}-{case.attention}"


def config_of(case: Case, chosen: Mapping[str, Any]) -> Config:
    """Its preset, changed by `chosen`."""
    of_case = {"context": case.context, "pattern": case.pattern, "attention": case.attention}
    return configure(case.preset, {**chosen, **of_case})


def train_all(
    configs: Mapping[str, Config], store: Store, out: Path, pause: Pause, facts: Mapping[str, str], console: Console
) -> bool:
    """Returns whether all are complete. Raises ValueError if a folder holds a run of other settings or another text."""
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
            tensorboard=False, console=console,
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
