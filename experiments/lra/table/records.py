"""Times and accuracies as measurements."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from experiments.lra.table.accuracy import Accuracy
from experiments.lra.table.measure import OK, Row
from experiments.measurements import Measurement, Run
from experiments.training.environment import FACTS
from experiments.training.reading import read_json

_NOT_VERSIONS = {"run", "device", "driver", "date", "commit", "command", "steps", "note"}


def run_of(facts: Mapping[str, str]) -> Run:
    known = {name: facts.get(name, "unknown") for name in FACTS}
    versions = {name: text for name, text in facts.items() if name not in _NOT_VERSIONS}
    helped = [facts[name] for name in ("steps", "note") if name in facts]
    return Run(
        known["device"], known["driver"], versions, known["commit"], known["date"], known["command"], None,
        tuple(helped),
    )  # fmt: skip


def run_of_runs(folder: Path, commit: str) -> Run:
    for path in sorted(folder.rglob("metrics.json")):
        metrics = read_json(path, "the result of a run", "device", "versions")
        day = datetime.fromtimestamp(path.stat().st_mtime, tz=timezone.utc).strftime("%Y-%m-%d")
        command = "python -m experiments.lra arena; each row has its settings"
        return Run(metrics["device"], "unknown", metrics["versions"], commit, day, command, None)
    raise FileNotFoundError(f"there is no finished run below {folder}")


def of_times(rows: Sequence[Row]) -> list[Measurement]:
    """The time of a step by task and variant; of a task that was measured again with half the batch, the last."""
    found = {}
    for row in rows:
        name = f"lra/{row.task}/step/{row.variant}"
        if row.status == OK and row.ms is not None:
            settings = {"batch": row.batch, "tokens_per_s": row.tokens_per_s, "memory_gb": row.memory_gb}
            found[name] = Measurement(name, row.ms, row.spread, "ms", settings)
        else:
            found[name] = Measurement(name, None, None, "ms", {"batch": row.batch}, failure=row.reason or row.status)
    return list(found.values())


def of_means(means: Mapping[str, tuple[float, int] | None]) -> list[Measurement]:
    return [
        Measurement(f"lra/mean-of-{count}-tasks/speed/{variant}", value, None, "times standard attention's")
        for variant, (value, count) in ((name, mean) for name, mean in means.items() if mean is not None)
    ]


def of_accuracies(accuracies: Iterable[Accuracy]) -> list[Measurement]:
    """The accuracy of each setting in percent: the mean of all its seeds, and their deviation."""
    found = []
    for each in accuracies:
        folder = each.folder.removesuffix(f"/seed{each.seeds}")
        run = folder.replace(f"-{each.variant}", "", 1).replace("/", "-")
        name = f"lra/{each.task.replace(', ', '-')}/accuracy/{run}/{word(each.variant)}"
        settings = {
            "seeds": each.seeds,
            "runs": [100 * accuracy for accuracy in each.values],
            "validation": None if each.validation is None else 100 * each.validation,
            "steps": each.steps,
            "minutes": each.training_seconds / 60,
            "parameters": each.parameters,
            "positions": each.positions,
            "helps": each.helps,
            "learned_before": each.initial,
            "best_rule": each.best_rule,
            "best_rule_accuracy": 100 * each.best_rule_accuracy,
        }
        if word(each.variant) != each.variant:
            settings["mask"] = each.variant
        value = 100 * each.mean
        if each.std is None or not math.isfinite(each.std) or not value:
            found.append(Measurement(name, value, None, "%", settings))
        else:
            spread = 100 * each.std / value
            found.append(Measurement(name, value, spread, "%", settings, spread_of="seeds", seeds=each.runs))
    return found


def word(variant: str) -> str:
    """A variant as a part of a name.

    >>> word("local(n, window=8) | butterfly(n)")
    'local-n-window-8-butterfly-n'
    """
    return re.sub(r"\W+", "-", variant).strip("-")
