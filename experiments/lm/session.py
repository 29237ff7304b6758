from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.lm.config import Config
from experiments.lm.data.store import Store, tokens_of
from experiments.lm.train import Run
from experiments.training.distributed import Ranks
from experiments.training.session import train_shown
from experiments.training.trainer import Pause

INSTALLED = ("site-packages", "dist-packages")


def standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def find_tokens(config: Config, data: Path, ranks: Ranks, console: Console) -> Store:
    return ranks.first_before_others(
        lambda: tokens_of(data, config.vocabulary, lambda text: console.print(text, soft_wrap=True, highlight=False))
    )


def train(
    config: Config,
    store: Store,
    folder: Path,
    *,
    resume: bool,
    overwrite: bool,
    pause: Pause,
    ranks: Ranks,
    console: Console,
) -> dict[str, Any] | None:
    run = Run(config, store, folder, resume=resume, overwrite=overwrite, ranks=ranks)
    count = sum(parameter.numel() for parameter in run.model.parameters())
    console.print(
        f"{folder}: {count / 1e6:,.0f}M parameters, {store.about['tokens']['train']:,} tokens, "
        f"{config.batch:,} sequences of {config.context:,} a step, {config.pattern}",
        soft_wrap=True,
        highlight=False,
    )
    metrics = train_shown(run, lambda: run.train(pause), console, config.pattern, resumed=resume)
    if metrics is None:
        console.print(f"Paused at step {run.state.step}")
    return metrics
