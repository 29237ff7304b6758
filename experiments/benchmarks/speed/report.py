"""The report of one or of several runs: tables as text and Markdown, and pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from experiments.benchmarks.speed import plots, tables
from experiments.benchmarks.speed.cases import GROUPS
from experiments.benchmarks.speed.frame import newest
from experiments.training.environment import FACTS

LEGEND = (
    "ours: milliseconds (useful TFLOP/s; dead scores count nothing); f forward without gradients, b backward, f+b one "
    "call of both. Peers: their time over ours in the same run, above 1 ours is faster. error: of ours against fp64, "
    "output and gradients, in units of the yardstick (at most 1 is right). Shape: batch x heads (of queries/of keys) x "
    "tokens x head dim."
)


def _findings(rows: pd.DataFrame) -> list[tuple[str, tables.Table]]:
    """The tables of the report. They use all runs, because the newest row of a case may be newer than the newest pair
    of two cases.
    """
    shown = newest(rows)
    made = {
        "Efficiency: 1 is time in proportion to density": tables.efficiency(rows),
        "Small mask blocks": tables.blocks(rows),
        "Call overhead on the host": tables.calls(shown),
        "First call of a new process": tables.first_calls(shown),
        "Peak memory, inputs and mask included": tables.memory(rows),
    }
    return [(title, table) for title, table in made.items() if table is not None]


def text(rows: pd.DataFrame) -> str:
    """The report of the rows of one device for a terminal, with the most important part last."""
    shown = newest(rows)
    table = tables.best(shown)
    parts = [] if table is None else [tables.plain(table), LEGEND]
    parts += ["\n".join(f"- {line}" for line in tables.reasons(shown))]
    parts += [f"{title}\n{tables.plain(found)}" for title, found in _findings(rows)]
    return "\n\n".join(part for part in parts if part)


def markdown(rows: pd.DataFrame, pictures: dict[str, Path]) -> str:
    """The report of the rows of one device."""
    shown = newest(rows)
    runs = shown.drop_duplicates("run").sort_values("run")
    facts = ["\n".join(f"- {name}: {run[name]}" for name in FACTS if name != "run") for _, run in runs.iterrows()]
    checks = "\n".join(f"- {line}" for line in tables.checks(shown))
    parts = [f"# Speed on {runs.iloc[-1]['device']}", *facts, LEGEND]
    parts += [f"![{name}]({path.name})" for name, path in pictures.items()]
    for title, table in _findings(rows):
        parts += [f"## {title}", tables.markdown(table)]
    for group, question in GROUPS.items():
        part = shown[shown["group"] == group]
        table, ratios = tables.best(part), tables.ratios(part)
        if table is not None:
            parts += [f"## {group}: {question.rsplit(' (', 1)[0]}", tables.markdown(table)]
        if ratios is not None:
            parts += ["Every peer's time over ours:", tables.markdown(ratios)]
    parts += ["## Not measured, and why", "\n".join(f"- {line}" for line in tables.reasons(shown)) or "Nothing."]
    parts += ["## Compared with fp64", checks or "Nothing."]
    return "\n\n".join(parts) + "\n"


def save(rows: pd.DataFrame, folder: Path) -> list[Path]:
    """Writes speed.md and the pictures into `folder`, one set for each device. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    devices = list(dict.fromkeys(rows["device"]))
    files = []
    for device in devices:
        part = rows[rows["device"] == device]
        suffix = "" if len(devices) == 1 else "-" + re.sub(r"\W+", "-", device).strip("-").lower()
        shown = newest(part)
        versions = shown.drop_duplicates("run").sort_values("run").iloc[-1]
        title = f"{device}, torch {versions['torch']}, triton {versions['triton']}, commit {versions['commit']}"
        pictures = plots.save(shown, title, folder, suffix)
        path = folder / f"speed{suffix}.md"
        path.write_text(markdown(part, pictures))
        files += [path, *pictures.values()]
    return files
