"""The arena's table from the stored measurements: figures, and what is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.lra.shipped import shipped
from experiments.lra.table.accuracy import BEFORE, helps
from experiments.lra.table.report import markdown
from experiments.measurements import Measurement, read

# Ma et al., "Mega: Moving Average Equipped Gated Attention" (ICLR 2023), with its own retrieval.
MEGA = {"listops": 63.1, "text": 90.4, "retrieval": 91.3, "image": 90.4, "pathfinder32": 96.0, "pathfinder128": 98.0}
TASKS = ("listops", "text", "books-matching", "image", "pathfinder32", "pathfinder128")
NAMES = {"pathfinder32": "Pathfinder-32", "pathfinder128": "Path-X", "listops": "ListOps"}
WITHOUT = "no-attention"
CNNS = ("small-cnn", "unet")
ALONE = "local-n-window-1"  # a model whose tokens see themselves alone
PATHX = "pathx/path-x/accuracy/labels-alone/"  # of ../pathx
RUNS = "runs.jsonl"
DENSE = ("dense", "sdpa", "standard")
SEEDS = 3
AGAIN = "/tested-again/"
TEXT = """# The arena's rows

Written by `python -m experiments.lra record` from the files of this folder and `../pathx/models.jsonl`. Each line is
one setting, with all of its seeds; a line without ± is a single run. Accuracies are in percent. Their standard error is
0.9 on the 2,000 expressions of ListOps, and 0.1 to 0.4 on the other tasks. The best setting of a task is the best in
validation, or in the test if there was no validation. For text, as in the arena, the validation examples are a part of
the test split. The best model without attention is the best in the test. Where the best setting has no dense model,
the column shows another setting: its dense model, and in brackets its sparse model.

"""
LIMITS = """
**The averages do not compare these models with Mega.** Mega was tested on the arena's files, by the arena's rules,
without this extra help, and on retrieval; our figures are mostly one run each. In ListOps ours is told how the
expression is nested, and trained on the value of every nested expression.

What the tables do not show: `books-matching` replaces retrieval and is not the arena's task; no transformer or CNN has
learned it yet. Of the dense run on text only the log was kept. The sparse Pathfinder-32 model in brackets shared its
GPU, and took half as many steps as the dense one. Images are from JPEG, quality 75. ListOps, Pathfinder-32 and Path-X
come from rewritten generators with the arena's parameters. Settings were changed after test results of earlier settings
were known. The extra help differs from row to row, so two rows compare two masks only if all else in them is equal. The
models of `best` also contain convolutions; networks of convolutions alone were trained on {cnn}. In
Path-X, `block-sparse-2080000-drawings` drew from 160,000 images of each length in each stage, about 0.8 million in all;
[its table](../pathx/table.md) has the other settings. More runs: accuracies.jsonl, runs.jsonl.

"""

TESTED = """
The stored weights were rounded to 8 bits and tested again on a CPU, on the first examples of the test split (± is the
standard error):

"""


def rendered(folder: Path) -> str:
    files = [path for path in sorted(folder.glob("*.jsonl")) if path.name != RUNS]
    stored = [each for path in files for each in read(path)[1] if each.value is not None]
    found = [each for each in stored if "/accuracy/" in each.name]
    found = [with_settings(each, configs_of(folder / RUNS)) for each in found]
    pathx = folder.parent / "pathx" / "models.jsonl"
    path_x = [each for each in read(pathx)[1] if each.name.startswith(PATHX)] if pathx.is_file() else []
    by_task = {task: sorted((each for each in found if task_of(each) == task), key=place) for task in TASKS}
    if path_x:
        by_task["pathfinder128"] = path_x  # in the file's order: the headline first
    models = shipped(folder.parents[1] / "weights")
    weights = {each.figure: f"[weights](../../weights/{each.folder.name})" for each in models}
    cnn = [NAMES.get(task, task) for task, found in by_task.items() if has_cnn(found)]
    limits = LIMITS.format(cnn=", ".join(cnn) or "no task")
    page = TEXT + markdown(best(by_task)) + "\n" + limits + markdown(every(by_task, weights)) + "\n"
    tests = [each for each in stored if AGAIN in each.name]
    return page + TESTED + markdown(again(tests, weights)) + "\n" if tests else page


def configs_of(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    shared, *runs = (json.loads(text) for text in path.read_text().splitlines())
    return {run["name"]: {**shared["config"], **run["config"]} for run in runs}


def with_settings(found: Measurement, configs: Mapping[str, dict[str, Any]]) -> Measurement:
    """With positions and helps, which the older files have only with the run's settings."""
    config = configs.get(found.settings.get("run", ""))
    if config is None:
        return found
    known = {"positions": config["positions"], "helps": helps({**BEFORE, **config})}
    if config.get("initial"):
        known["learned_before"] = "another run"
    return replace(found, settings={**known, **found.settings}, run=found.run)


def task_of(found: Measurement) -> str:
    return found.name.split("/")[1]


def place(found: Measurement) -> tuple[bool, float]:
    """Models with attention first, the best in validation first: its examples, but those of text, are not tested."""
    return is_without(found), -(validation(found) or found.value or 0)


def validation(found: Measurement) -> float | None:
    value = found.settings.get("validation")
    return mean(value) if isinstance(value, list) else value


def is_without(found: Measurement) -> bool:
    return setting(found) == WITHOUT or found.way in (*CNNS, ALONE)


def setting(found: Measurement) -> str:
    return found.name.split("/")[3]


def has_cnn(found: Sequence[Measurement]) -> bool:
    return any(each.way in CNNS or "CNN" in each.settings.get("best_rule", "") for each in found)


def is_dense(found: Measurement) -> bool:
    return found.way in DENSE


def is_sparse(found: Measurement) -> bool:
    return not (is_without(found) or is_dense(found))


def best(by_task: dict[str, list[Measurement]]) -> list[list[str]]:
    """A line for each task, with the average of those that have a figure."""
    lines = [["task", "sparse, best", "seeds", "dense, same setting", "without attention, best", "Mega", "missing"]]
    values = {}
    for task, found in by_task.items():
        sparse = next(filter(is_sparse, found), None)
        without = max(filter(is_without, found), key=lambda each: each.value or 0, default=None)
        dense = next((each for each in found if sparse and is_dense(each) and setting(each) == setting(sparse)), None)
        seeds = 0 if sparse is None else len(runs_of(sparse))
        missing = [f"{SEEDS - seeds} seeds" if seeds < SEEDS else "", "" if dense else "dense"]
        if sparse is not None:
            values[task] = sparse.value or 0
        lines.append([
            NAMES.get(task, task), accuracy(sparse), str(seeds), accuracy(dense) if dense else elsewhere(found),
            floor(without, sparse),
            f"{mega(task):.1f}" + ("" if task in MEGA else " (retrieval)"),
            ", ".join(filter(None, missing)) or "-",
        ])  # fmt: skip
    for name, told in (("", ()), (" without ListOps", ("listops",))):
        if shown := [task for task in values if task not in told]:
            ours, others = (mean(of(task) for task in shown) for of in (values.__getitem__, mega))
            lines.append([f"average of {len(shown)}{name}", f"{ours:.1f}", "", "", "", f"{others:.1f}", ""])
    return lines


def elsewhere(found: Sequence[Measurement]) -> str:
    """The dense model, and the sparse one in brackets, of the setting with the best sparse model that has both."""
    for sparse in filter(is_sparse, found):
        dense = next((each for each in found if is_dense(each) and setting(each) == setting(sparse)), None)
        if dense is not None:
            return f"{accuracy(dense)} ({accuracy(sparse)})"
    return "-"


def floor(without: Measurement | None, sparse: Measurement | None) -> str:
    """The best accuracy without attention, of a model or of a rule that the record names."""
    found = [] if without is None else [(without.value or 0, accuracy(without), without.way)]
    if sparse is not None and "best_rule_accuracy" in sparse.settings:
        rule = sparse.settings["best_rule_accuracy"]
        found.append((rule, f"{rule:.1f}", sparse.settings["best_rule"]))
    if not found:
        return "-"
    _, text, name = max(found)
    return f"{text} ({name})"


def mega(task: str) -> float:
    return MEGA.get(task, MEGA["retrieval"])


def every(by_task: dict[str, list[Measurement]], weights: Mapping[str, str]) -> list[list[str]]:
    """Every stored row; of the older runs only those in a task's best setting. weights: links, by the figure's name."""
    lines = [[
        "task", "setting", "mask", "accuracy", "each seed", "validation", "minutes", "steps", "parameters",
        "positions", "extra help", "trained before", "commit", "weights",
    ]]  # fmt: skip
    for task, found in by_task.items():
        top = next((setting(each) for each in found if is_sparse(each)), None)
        shown = [each for each in found if "run" not in each.settings or setting(each) == top]
        lines += [[NAMES.get(task, task), *line(each), weights.get(each.name, "-")] for each in shown]
    return lines


def again(tests: Sequence[Measurement], weights: Mapping[str, str]) -> list[list[str]]:
    lines = [["task", "setting", "accuracy of the run", "tested again", "examples", "weights"]]
    for each in sorted(tests, key=lambda each: TASKS.index(task_of(each))):
        error = (each.value or 0) * (each.spread or 0)
        settings = each.settings
        lines.append([
            NAMES.get(task_of(each), task_of(each)), setting(each), number(settings["accuracy_of_run"], ".1f"),
            f"{each.value:.1f} ± {error:.1f}", f"{settings['examples']:,} of {settings['of']:,}",
            weights.get(settings["figure"], "-"),
        ])  # fmt: skip
    return lines


def line(found: Measurement) -> list[str]:
    settings = found.settings
    runs = runs_of(found)
    return [
        setting(found),
        str(settings.get("mask", found.way)).replace("|", "\\|"),
        accuracy(found),
        " ".join(f"{value:.1f}" for value in runs) if len(runs) > 1 else "-",
        number(validation(found), ".1f"),
        number(settings.get("minutes"), ".1f"),
        number(settings.get("steps"), ",d"),
        number(settings.get("parameters"), ",d"),
        *(str(settings.get(name) or "-") for name in ("positions", "helps", "learned_before")),
        found.run.commit if found.run else "-",
    ]


def runs_of(found: Measurement) -> Sequence[float]:
    return [float(value) for value in found.settings.get("runs", [found.value])]


def accuracy(found: Measurement | None) -> str:
    """With the deviation over seeds, if there are several."""
    if found is None or found.value is None:
        return "-"
    off = f" ± {found.value * found.spread:.1f}" if found.spread_of == "seeds" and found.spread is not None else ""
    return f"{found.value:.1f}{off}"


def number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"
