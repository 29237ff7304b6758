"""The pages and the files of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path

from experiments.benchmarks.huggingface import generation, measure
from experiments.benchmarks.huggingface.implementations import OURS
from experiments.benchmarks.huggingface.measure import EXACT, FORWARD, STEP
from experiments.benchmarks.huggingface.shapes import Shape
from experiments.training.atomic_files import write_csv, write_text

GIB = 2**30


def models_page(rows: Sequence[measure.Row], shapes: Sequence[Shape], facts: Mapping[str, str]) -> str:
    """The page of `models`."""
    lines = ["# Models of Transformers", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += [
        "Error: the largest of logits and gradients of all parameters over what is allowed, twice that of eager",
        "attention in the same dtype; above 1 it is another function. In brackets: the time over that of sparseflash,",
        "above 1 sparseflash is faster. Peak: GiB of a training step, weights and gradients included.",
    ]
    for shape in shapes:
        of_model = [row for row in rows if row.model == shape.name]
        if not of_model:
            continue
        lines += ["", f"## {shape.name}", "", f"{shape.words}.", ""]
        lines += [f"| implementation | error | forward, {shape.unit} | training step, {shape.unit} | peak |"]
        lines += ["|---|---:|---:|---:|---:|"]
        lines += [f"| {' | '.join(cells)} |" for cells in summary(of_model)]
        reasons = {row.failure: f"- {row.implementation}, {row.what}: {row.failure}" for row in of_model if row.failure}
        lines += ["", *reasons.values()] if reasons else []
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[measure.Row]) -> list[list[str]]:
    """For each implementation of one model: its name, error, rates, and the peak of a training step."""
    found = {(row.implementation, row.what): row for row in rows}
    lines = []
    for name in dict.fromkeys(row.implementation for row in rows if row.what != EXACT):
        step = found.get((name, STEP))
        peak = "-" if step is None or not step.peak_bytes else f"{step.peak_bytes / GIB:.1f}"
        rates = [_rate(found.get((name, what)), found.get((OURS, what))) for what in (FORWARD, STEP)]
        lines.append([name, _error(found.get((name, EXACT))), *rates, peak])
    return lines


def _error(row: measure.Row | None) -> str:
    if row is None:
        return "-"
    return "failed" if row.failure else f"{row.value:.2f}"


def _rate(row: measure.Row | None, ours: measure.Row | None) -> str:
    if row is None:
        return "-"
    if row.failure:
        return "failed"
    ratio = "" if ours is None or ours is row or isnan(ours.ms) else f" ({row.ms / ours.ms:.2f})"
    return f"{row.value:,.0f}{ratio}"


def generate_page(
    rows: Sequence[generation.Row], checks: Mapping[str, str], words: str, facts: Mapping[str, str]
) -> str:
    """The page of `generate`."""
    lines = ["# Generation", "", *(f"- {name}: {value}" for name, value in facts.items()), f"- model: {words}", ""]
    if checks:
        lines += ["The tokens that eager attention gives, in fp32, from a short prompt with padding on the left:", ""]
        lines += ["| implementation | tokens |", "|---|---|"]
        lines += [f"| {name} | {found} |" for name, found in checks.items()]
        lines.append("")
    lines += ["| prompt | batch | implementation | prompt, tokens/s | ms a token | following, tokens/s | peak, GiB |"]
    lines += ["|---:|---:|---|---:|---:|---:|---:|"]
    for row in rows:
        numbers = [f"| {row.prompt:,} | {row.batch} | {row.implementation}"]
        if row.failure:
            numbers.append(f"{row.failure} | | | |")
        else:
            peak = "-" if row.peak_bytes is None else f"{row.peak_bytes / GIB:.1f}"
            numbers.append(f"{row.prompt_rate:,.0f} | {row.token_ms:.3f} | {row.rate:,.0f} | {peak} |")
        lines.append(" | ".join(numbers))
    return "\n".join(lines) + "\n"


def write(folder: Path, name: str, page: str, rows: Sequence[measure.Row | generation.Row]) -> None:
    """The page and the rows, as `name.md` and `name.csv`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{name}.md", page)
    if rows:
        write_csv(folder / f"{name}.csv", [asdict(row) for row in rows])
