"""The accuracies of models without attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from experiments.lra.config import Config
from experiments.lra.data.fingerprint import fingerprint
from experiments.lra.no_attention import linear
from experiments.lra.no_attention.network import network
from experiments.lra.no_attention.results import RULES
from experiments.lra.table.accuracy import collect
from experiments.lra.table.records import of_accuracies
from experiments.lra.tasks.task import Data
from experiments.lra.train import Run
from experiments.measurements import Measurement, slug
from experiments.training.distributed import find_device
from experiments.training.session import train_shown

RUN = 4  # tokens of the longest runs that are counted
MOST = 20_000  # training examples of a linear model of runs
KEPT = ("runs", "validation", "steps", "minutes", "parameters", "helps")


def measured(data: Data, rule: str, config: Config, seeds: Sequence[int], console: Console) -> Iterator[Measurement]:
    """The test accuracy of one model without attention, in percent; of a network after each seed the mean so far."""
    if rule not in RULES:
        raise ValueError(f"a model without attention must be one of {', '.join(RULES)}; got {rule!r}")
    if rule == "runs" and data.task.side is not None:
        raise ValueError(f"runs are of sequences; {data.task.name} has images: leave out runs")
    name = f"lra/{data.task.name}/accuracy/no-attention/{slug(RULES[rule])}"
    if rule == "cnn":
        for found in networks(data, config, seeds, console):
            yield replace(found, name=name)
        return
    fitted = linear.fitted(data, 1) if rule == "bag" else linear.fitted(data, RUN, MOST)
    settings = {
        "data": fingerprint(data),
        "validation": 100 * fitted.validation,
        "examples": fitted.examples,
        "parameters": fitted.parameters,
    }
    yield Measurement(name, 100 * fitted.accuracy, None, "%", settings)


def networks(data: Data, config: Config, seeds: Sequence[int], console: Console) -> Iterator[Measurement]:
    """Trained as the transformers are. Their folders are not kept: a run's files would call it a transformer."""
    with TemporaryDirectory() as folder:
        for done, seed in enumerate(seeds, start=1):
            own = replace(config, seed=seed)
            model = network(own, data.task, find_device(own.device))
            run = Run(own, data, Path(folder) / f"seed{seed}", model=model)
            train_shown(run, run.train, console, f"{data.task.name} seed {seed}", resumed=False)
            (found,) = of_accuracies(collect(Path(folder)))
            kept = {name: found.settings[name] for name in KEPT}
            seen = {"data": fingerprint(data), "batch": config.batch, "run_seeds": list(seeds[:done])}
            yield replace(found, settings=seen | kept)
