"""The times as table.json, times.jsonl and table.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from experiments.lra.table import records
from experiments.lra.table.measure import FAILED, WRONG, Row
from experiments.lra.table.shapes import FIVE, VARIANTS
from experiments.measurements import write as write_record
from experiments.training.atomic_files import write_json, write_text

# FlashAttention (Dao et al., 2022), table 3: speed-up as a geometric mean over the five tasks.
PAPER = {"dense": 2.4, "block-sparse": 2.8}
TITLES = {
    "standard": "standard attention",
    "sdpa": "PyTorch's scaled_dot_product_attention",
    "dense": "sparseflash, dense",
    "butterfly": "sparseflash, butterfly",
    "local": "sparseflash, local",
}
LEGEND = (
    "Times are medians of one training step (forward, backward, clipping, optimiser) by the host's clock. Variants "
    "take turns, on batches of the tasks' full length, with the preset's model. Standard attention is the leanest "
    "plain form: scale on q, mask in place, softmax in the model's precision. Logits and gradients are first compared "
    "with fp64; the allowed error of 1 is twice standard attention's. Memory is for a step launched by the host."
)


@dataclass
class Results:
    facts: dict[str, str] = field(default_factory=dict)  # device, versions, command of the times
    times: list[Row] = field(default_factory=list)


def compared(times: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """By task and variant, the row of the largest batch with a time for standard attention, or the last row."""
    chosen: dict[tuple[str, str], Row] = {}
    for row in times:
        known = chosen.get((row.task, row.variant))
        if known is None or known.speedup is None:
            chosen[row.task, row.variant] = row
    return chosen


def mean_speedup(times: Sequence[Row], variant: str) -> tuple[float, int] | None:
    found = [row.speedup for (_, name), row in compared(times).items() if name == variant and row.speedup is not None]
    return (statistics.geometric_mean(found), len(found)) if found else None


def summary(results: Results) -> list[list[str]]:
    """The paper's table: one line for each variant, with the speed-up of each task."""
    tasks = [task for task in FIVE if any(task == row.task for row in results.times)]
    chosen = compared(results.times)
    table = [["", *tasks, "geometric mean"]]
    for variant in VARIANTS:
        cells = [_speed(chosen.get((task, variant))) for task in tasks]
        if any(cells):
            mean = mean_speedup(results.times, variant)
            over = "" if mean is None or mean[1] == len(FIVE) else f" ({mean[1]} tasks)"
            table.append([TITLES[variant], *(cell or "-" for cell in cells), f"{mean[0]:.2f}x{over}" if mean else "-"])
    return table


def _speed(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.speedup:.2f}x" if row.speedup is not None else row.status


def times_table(times: Sequence[Row]) -> list[list[str]]:
    table = [["task", "tokens", "batch", "", "ms a step", "tokens/s", "memory, GB", "speed-up", "error", "remark"]]
    for row in times:
        table.append(
            [
                row.task,
                str(row.length),
                str(row.batch),
                row.variant,
                row.status if row.ms is None else f"{row.ms:.2f}",
                _number(row.tokens_per_s, ",.0f"),
                _number(row.memory_gb, ".2f"),
                _number(row.speedup, ".2f"),
                _number(row.error, ".2f"),
                row.reason,
            ]
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def markdown(table: Sequence[Sequence[str]]) -> str:
    head, *lines = ("| " + " | ".join(cells) + " |" for cells in table)
    return "\n".join([head, "|" + "---|" * len(table[0]), *lines])


def page(results: Results) -> str:
    facts = "\n".join(f"- {name}: {value}" for name, value in results.facts.items())
    paper = ", ".join(f"{name} {speed:.1f}x" for name, speed in PAPER.items())
    parts = ["# Long Range Arena: speed of training", facts, LEGEND, markdown(summary(results))]
    parts += [f"FlashAttention's table 3, on other hardware: {paper}."]
    parts += ["## Times", markdown(times_table(results.times))]
    return "\n\n".join(parts) + "\n"


def write(results: Results, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "table.json", {"facts": results.facts, "times": [asdict(row) for row in results.times]})
    means = {variant: mean_speedup(results.times, variant) for variant in VARIANTS if variant != "standard"}
    found = [*records.of_times(results.times), *records.of_means(means)]
    write_record(out / "times.jsonl", records.run_of(results.facts), found)
    write_text(out / "table.md", page(results))


def all_right(times: Sequence[Row]) -> bool:
    return not any(row.status in (WRONG, FAILED) for row in times if row.variant != "sdpa")
