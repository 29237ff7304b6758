"""The demo: draw four masks, train with each, and check each for exactness."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.lra import exactness, mask_picture
from experiments.lra.baselines import baselines, majority
from experiments.lra.config import Config
from experiments.lra.data.batches import collate
from experiments.lra.exactness import ALLOWED, Exactness
from experiments.lra.model.build import mask_of
from experiments.lra.tasks.task import Data
from experiments.lra.train import Run
from experiments.training.atomic_files import write_json
from experiments.training.progress_bar import TrainingBar

MASKS = ("dense", "local", "butterfly", "experiments.lra.custom_mask:beacons")
CHECKED_EXAMPLES = 8


@dataclass(frozen=True)
class Outcome:
    name: str
    metrics: dict[str, Any]
    exactness: Exactness


def run(config: Config, data: Data, out: Path, console: Console, *, names: tuple[str, ...] = MASKS) -> bool:
    built = {short(name): mask_of(replace(config, mask=name)) for name in names}
    drawn = mask_picture.draw(built, out / "masks.png")
    console.print(f"The masks: {drawn}", soft_wrap=True)
    results = out / "demo.json"
    outcomes: list[Outcome] = []
    for name in names:
        outcomes.append(train_one(replace(config, mask=name), data, out, console))
        write_json(results, [asdict(outcome) for outcome in outcomes])
    console.print(table(outcomes, data))
    for line in verdicts(outcomes, data):
        console.print(line)
    console.print(f"Picture of the masks: {drawn}\nAll numbers: {results}", soft_wrap=True)
    for line in next_steps(out):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return all(outcome.exactness.holds for outcome in outcomes)


def train_one(config: Config, data: Data, out: Path, console: Console) -> Outcome:
    name = short(config.mask)
    training = Run(config, data, out / name, overwrite=True)
    with TrainingBar(console, f"{name:9}", training.progress) as bar:
        training.listeners.append(bar.show)
        metrics = training.train()
    assert metrics is not None
    batch = collate(data.test, np.arange(min(CHECKED_EXAMPLES, len(data.test))), training.shape)
    return Outcome(name, metrics, exactness.check(training.model, batch.to(training.device), config))


def next_steps(out: Path) -> list[str]:
    python = shlex.quote(sys.executable if not sys.executable.startswith(str(Path.cwd())) else
                         str(Path(sys.executable).relative_to(Path.cwd())))  # fmt: skip
    train = f"{python} -m experiments.lra train --preset demo --out {shlex.quote(str(out))}"
    mine = "experiments/lra/custom_mask.py"
    return [
        "",
        "What next?",
        f"  {python} -m sparseflash show 'longformer(2048, window=256, global_tokens=16)'   # any pattern: cost, reach",
        f"  {train} --mask 'longformer(n, window=64, global_tokens=16)'   # train with it",
        f"  {train} --mask {mine}:beacons   # or with a function of your own: copy this file and change it",
        f"  {python} -m experiments.pathx train --preset cpu   # two minutes of Path-X",
        "  docs/pages/tutorial.md   # masks in your own model",
    ]


def short(name: str) -> str:
    return name.rpartition(":")[2]


def table(outcomes: list[Outcome], data: Data) -> Table:
    first = outcomes[0].metrics
    made = "generated" if data.generated else "released"
    steps = sorted(outcome.metrics["steps"] for outcome in outcomes)
    result = Table(
        title=f"ListOps ({made}), {first['length']} tokens, {first['device']}",
        caption=(
            "error: largest deviation of the output and the gradients of attention\n"
            "from dense attention in fp64, on the trained model's own q, k and v,\n"
            "relative to the largest value; plain: that of dense attention in the\n"
            f"model's precision; loss: nats, from the first tenth of {steps[0]} to {steps[-1]} training\n"
            "steps to the test split; accuracy: test split"
        ),
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    result.add_column("mask", no_wrap=True)
    for column in ("density", "error", "plain", "tokens/s", "loss", "accuracy"):
        result.add_column(column, justify="right", no_wrap=True)
    for outcome in outcomes:
        metrics, exact = outcome.metrics, outcome.exactness
        result.add_row(
            outcome.name,
            f"{100 * metrics['density']:.1f} %",
            f"{exact.ours:.1e}" if exact.holds else f"[red]{exact.ours:.1e}[/red]",
            f"{exact.plain:.1e}",
            f"{metrics['tokens_per_s']:,.0f}",
            f"{metrics['first_loss']:.2f} → {metrics['test_loss']:.2f}",
            f"{100 * metrics['test_accuracy']:.1f} %",
        )
    result.add_section()
    for baseline in baselines(data):
        loss = "" if baseline.loss is None else f"{baseline.loss:.2f}"
        numbers = (loss, f"{100 * baseline.accuracy:.1f} %")
        result.add_row(baseline.rule, "", "", "", "", *numbers, style="dim")
    return result


def verdicts(outcomes: list[Outcome], data: Data) -> list[str]:
    inexact = [outcome.name for outcome in outcomes if not outcome.exactness.holds]
    prior = majority(data).loss
    unlearnt = [outcome.name for outcome in outcomes if outcome.metrics["test_loss"] >= prior]
    exact = f"[green]Exact:[/green] every mask is within {ALLOWED:g} times the plain implementation's error."
    learnt = f"[green]Learnt:[/green] every test loss is below that of the class frequencies, {prior:.2f} nats."
    return [
        exact if not inexact else f"[red]Not exact:[/red] {', '.join(inexact)}.",
        learnt if not unlearnt else f"[yellow]Not learnt in this time:[/yellow] {', '.join(unlearnt)}.",
    ]
