from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.lra import seed_results
from experiments.lra.config import Config
from experiments.lra.data.fingerprint import described
from experiments.lra.tasks.task import Data
from experiments.lra.train import Run, check_initial
from experiments.training import series
from experiments.training.distributed import Ranks
from experiments.training.session import train_shown
from experiments.training.trainer import Pause


@dataclass(frozen=True)
class Session:
    data: Data
    overwrite: bool
    pause: Pause
    ranks: Ranks
    console: Console

    def train_series(self, config: Config, seeds: tuple[int, ...], folder: Path, resume: bool) -> dict[str, Any] | None:
        if not resume:
            check_initial(config, self.data)
        settings = seed_results.settings(config, self.data.folder)
        self.ranks.on_first(
            lambda: series.begin(
                folder, seeds, settings, initial=config.initial, resume=resume, overwrite=self.overwrite
            )
        )
        used = described(self.data)

        def train(seed: int, place: Path, resume: bool) -> dict[str, Any] | None:
            return self.train(replace(config, seed=seed), place, resume)

        def state(seed: int, place: Path) -> tuple[dict[str, Any] | None, bool]:
            return seed_results.state(replace(config, seed=seed), used, place)

        return series.run(seeds, folder, train, state, seed_results.summary, resume=resume, ranks=self.ranks)

    def train(self, config: Config, folder: Path, resume: bool) -> dict[str, Any] | None:
        run = Run(config, self.data, folder, resume=resume, overwrite=self.overwrite, ranks=self.ranks)
        self.console.print(f"{run.folder}: {run.mask!r}", soft_wrap=True)
        metrics = train_shown(
            run,
            lambda: run.train(self.pause),
            self.console,
            f"{config.mask} seed {config.seed}",
            resumed=resume,
        )
        if metrics is None:
            self.console.print(f"Paused at step {run.state.step}")
        return metrics
