"""The results as table.json, times.jsonl, accuracies.jsonl and table.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from experiments.lra.table import records
from experiments.lra.table.accuracy import Accuracy
from experiments.lra.table.measure import FAILED, WRONG, Row
from experiments.lra.table.shapes import FIVE, VARIANTS
from experiments.measurements import Measurement
from experiments.measurements import write as write_record
from experiments.training.atomic_files import write_json, write_text
from experiments.training.reading import read_json, reading

# FlashAttention (Dao et al., 2022), table 3: speed-up as a geometric mean over the five tasks, and its mean accuracy.
PAPER = {"standard": (1.0, 0.593), "dense": (2.4, 0.598), "block-sparse": (2.8, 0.596)}
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


ACCURACIES = (
    "Validation: of the tested weights, or else a run's last. Training: the mean of the last 20 log lines. Best rule: "
    "the best baseline that avoids the task. Tested: the step of the tested weights, the last or the best "
    "validation's. Minutes: training time. Runs: their folder."
)


@dataclass
class Results:
    facts: dict[str, str] = field(default_factory=dict)  # device, versions, command of the times
    times: list[Row] = field(default_factory=list)
    accuracies: list[Accuracy] = field(default_factory=list)


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


def matching(accuracies: Sequence[Accuracy], task: str, variant: str) -> list[Accuracy]:
    """The settings of a task that match a variant; only those on released data if any exist."""
    found = [each for each in accuracies if (each.task, each.variant) == (task, variant)]
    return [each for each in found if each.data == "released"] or found


def summary(results: Results) -> list[list[str]]:
    """The paper's table: one line for each variant, with speed-up and accuracy of each task."""
    tasks = [task for task in FIVE if any(task == row.task for row in [*results.times, *results.accuracies])]
    chosen = compared(results.times)
    table = [["", *tasks, "geometric mean"]]
    for variant in VARIANTS:
        cells = [
            ", ".join(filter(None, (_speed(chosen.get((task, variant))), _accuracy(results.accuracies, task, variant))))
            for task in tasks
        ]
        if any(cells):
            mean = mean_speedup(results.times, variant)
            over = "" if mean is None or mean[1] == len(FIVE) else f" ({mean[1]} tasks)"
            table.append([TITLES[variant], *(cell or "-" for cell in cells), f"{mean[0]:.2f}x{over}" if mean else "-"])
    return table


def _speed(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.speedup:.2f}x" if row.speedup is not None else row.status


def _accuracy(accuracies: Sequence[Accuracy], task: str, variant: str) -> str:
    found = matching(accuracies, task, variant)
    if len(found) > 1:
        return f"{len(found)} settings below"
    return percent(found[0]) if found else ""


def percent(accuracy: Accuracy) -> str:
    spread = "" if accuracy.std is None else f" ± {100 * accuracy.std:.1f}"
    return f"{100 * accuracy.mean:.1f}{spread} % (n={accuracy.runs})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


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


def accuracy_table(accuracies: Sequence[Accuracy]) -> list[list[str]]:
    table = [[
        "task", "data", "", "test accuracy", "validation", "training", "majority", "best rule", "extra help",
        "trained before", "steps", "tested", "minutes", "tokens/s", "parameters", "device", "runs", "setting",
    ]]  # fmt: skip
    for each in accuracies:
        table.append(
            [
                each.task,
                each.data,
                each.variant,
                percent(each),
                _percent(each.validation),
                _percent(each.training),
                f"{100 * each.majority:.1f} %",
                f"{100 * each.best_rule_accuracy:.1f} % ({each.best_rule})",
                each.helps,
                each.initial,
                f"{each.steps:,}",
                each.tested_steps or "last",
                f"{each.training_seconds / 60:.1f}",
                f"{each.tokens_per_s:,.0f}",
                f"{each.parameters:,}",
                each.device,
                each.folder,
                each.setting,
            ]
        )
    return table


def markdown(table: Sequence[Sequence[str]]) -> str:
    head, *lines = ("| " + " | ".join(cells) + " |" for cells in table)
    return "\n".join([head, "|" + "---|" * len(table[0]), *lines])


def page(results: Results) -> str:
    parts = ["# Long Range Arena: accuracy and speed of training"]
    if results.facts:
        parts.append("\n".join(f"- {name}: {value}" for name, value in results.facts.items()))
    parts += [LEGEND, markdown(summary(results))]
    paper = ", ".join(f"{name} {speed:.1f}x and {100 * mean:.1f} %" for name, (speed, mean) in PAPER.items())
    parts.append(f"FlashAttention's table 3, on other hardware: {paper} (mean accuracy).")
    if results.times:
        parts += ["## Times", markdown(times_table(results.times))]
    if results.accuracies:
        parts += ["## Accuracies", ACCURACIES, markdown(accuracy_table(results.accuracies))]
    return "\n\n".join(parts) + "\n"


def write(results: Results, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    rows = {"times": [asdict(row) for row in results.times], "accuracies": [asdict(a) for a in results.accuracies]}
    write_json(out / "table.json", {"facts": results.facts, **rows})
    means = {variant: mean_speedup(results.times, variant) for variant in VARIANTS if variant != "standard"}
    _record(results, out / "times.jsonl", [*records.of_times(results.times), *records.of_means(means)])
    _record(results, out / "accuracies.jsonl", records.of_accuracies(results.accuracies))
    write_text(out / "table.md", page(results))


def _record(results: Results, path: Path, measurements: list[Measurement]) -> None:
    if measurements:
        write_record(path, records.run_of(results.facts), measurements)
    else:
        path.unlink(missing_ok=True)


def read_times(out: Path) -> Results:
    path = out / "table.json"
    if not path.is_file():
        raise FileNotFoundError(f"there are no times to keep in {out}: table.json is missing")
    saved = read_json(path, "the times of an earlier table", "facts", "times")
    with reading(path, "the times of an earlier table"):
        return Results(saved["facts"], [Row(**row) for row in saved["times"]])


def all_right(times: Sequence[Row]) -> bool:
    return not any(row.status in (WRONG, FAILED) for row in times if row.variant != "sdpa")
