from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from experiments.training import run_folder, run_log
from experiments.training.reading import read_json, reading
from experiments.training.run_log import Record


class Validation(NamedTuple):
    tokens: int
    seconds: float
    loss: float


class Finished(NamedTuple):
    name: str
    records: list[Record]
    metrics: dict[str, Any] | None
    positions: list[tuple[int, int, float]]

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    def validations(self) -> list[Validation]:
        last = self.of_kind("train")[-1]
        tokens_a_step = last["tokens"] // last["step"]
        return [Validation(each["step"] * tokens_a_step, each["seconds"], each["loss"]) for each in self.of_kind("val")]


def read(folder: Path) -> Finished:
    records = run_log.read(folder / run_folder.LOG)
    if not records:
        raise FileNotFoundError(f"there is no log of a run in {folder}")
    metrics, positions = folder / "metrics.json", folder / "positions.csv"
    rows = []
    if positions.is_file():
        with reading(positions, "a table of losses by position"), open(positions, newline="") as file:
            rows = [(int(row["begin"]), int(row["end"]), float(row["loss"])) for row in csv.DictReader(file)]
    result = read_json(metrics, "the result of a run") if metrics.is_file() else None
    return Finished(folder.name, records, result, rows)


def table(runs: Sequence[Finished]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    made.add_column("run", overflow="fold")
    for name in ("steps", "tokens", "minutes", "tokens/s", "MFU", "train", "val"):
        made.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        last, validated = run.of_kind("train")[-1], run.of_kind("val")
        made.add_row(
            run.name,
            f"{last['step']:,}",
            f"{last['tokens'] / 1e6:,.1f}M",
            f"{last['seconds'] / 60:.1f}",
            f"{last['tokens_per_s']:,.0f}",
            f"{last['mfu']:.1%}" if "mfu" in last else "",
            f"{last['loss']:.3f}",
            f"{validated[-1]['loss']:.4f}" if validated else "",
        )
    return made


def plot(runs: Sequence[Finished], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    (over_minutes, over_tokens), (speed, by_position) = axes
    for run in runs:
        train, val = run.of_kind("train"), run.validations()
        (line,) = over_minutes.plot([each["seconds"] / 60 for each in train], [each["loss"] for each in train], lw=0.8)
        of_run = {"color": line.get_color(), "label": run.name}
        losses = [each.loss for each in val]
        over_minutes.plot([each.seconds / 60 for each in val], losses, "o-", ms=3, **of_run)
        over_tokens.plot([each.tokens / 1e6 for each in val], losses, "o-", ms=3, **of_run)
        speed.plot([each["step"] for each in train], [each["tokens_per_s"] for each in train], lw=0.8, **of_run)
        places = [max(1, (begin + end) / 2) for begin, end, _ in run.positions]
        by_position.plot(places, [loss for *_, loss in run.positions], "o-", ms=3, **of_run)
    titles = {
        over_minutes: ("minutes", "loss, nats (dots: validation)"),
        over_tokens: ("million tokens", "validation loss, nats"),
        speed: ("step", "tokens/s"),
        by_position: ("position in the context", "validation loss, nats"),
    }
    for place, (below, beside) in titles.items():
        place.set_xlabel(below)
        place.set_ylabel(beside)
    speed.set_ylim(bottom=0)
    by_position.set_xscale("log")
    over_minutes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
