from __future__ import annotations

from pathlib import Path

from rich.console import Console

from experiments.lra.config import Config
from experiments.lra.data.listops.generator import LABEL, Settings, generate
from experiments.lra.tasks import advice, load
from experiments.lra.tasks.task import Data
from experiments.training.progress_bar import counting_bar
from experiments.training.workers import available_cores

DATA = Path("data/lra")


def generated(settings: Settings, parent: Path, console: Console, workers: int | None = None) -> Path:
    if (parent / settings.folder_name / LABEL).exists():
        return parent / settings.folder_name
    name = f"Generating ListOps on {workers or available_cores()} cores"
    with counting_bar(console, name, sum(settings.sizes)) as progress:
        return generate(settings, parent, workers=workers, progress=progress)


def find_data(config: Config, folder: Path | None, console: Console) -> Data:
    """Generates nothing into a user's folder, because a user who wants the released files must not receive others."""
    if folder is None and config.task != "listops":
        raise ValueError(f"the task {config.task} needs --data, the folder of its files: {advice(config.task)}")
    return load(config.task, generated(config.generator, DATA, console) if folder is None else folder, config.data)
