"""The rows as CSV, as a page, and as plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.benchmarks.io.cases import BUTTERFLY, STANDARD
from experiments.benchmarks.io.measuring import Row

GIGA = 1e9
PAPER = (
    "The paper (Dao et al., 2022, figure 2; N=1024, D=64, 16 heads, batch 64, forward and backward, A100): standard "
    "attention 66.6 GFLOPs, 40.3 GB, 41.7 ms; FlashAttention 75.2 GFLOPs, 4.4 GB, 7.3 ms."
)


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows as a table with units in the column names. Bytes are those of the counters if `counted`, else of the
    model.
    """
    return pd.DataFrame([_line(row) for row in rows])


def _line(row: Row) -> dict[str, Any]:
    case, cost = row.case, row.cost
    return {
        "case": case.name,
        "batch": case.batch,
        "heads": case.heads,
        "length": case.length,
        "head_dim": case.head_dim,
        "block": case.block,
        "dtype": str(case.dtype).removeprefix("torch."),
        "density": row.density,
        "GFLOP": cost.flops / GIGA,
        "model GB": cost.bytes / GIGA,
        "HBM GB": None if row.both_hbm is None else row.both_hbm / GIGA,
        "L2 GB": None if row.both_l2 is None else row.both_l2 / GIGA,
        "ms": row.both_ms,
        "forward GFLOP": cost.forward_flops / GIGA,
        "forward model GB": cost.forward_bytes / GIGA,
        "forward HBM GB": None if row.forward_hbm is None else row.forward_hbm / GIGA,
        "forward L2 GB": None if row.forward_l2 is None else row.forward_l2 / GIGA,
        "forward ms": row.forward_ms,
        "reason": row.reason,
    }


def markdown(rows: Sequence[Row], facts: dict[str, str]) -> str:
    """The page: forward and backward of every case, grouped by shape."""
    lines = ["# Operations, bytes, time", "", *(f"- {name}: {value}" for name, value in facts.items()), "", PAPER, ""]
    table = frame(rows)
    shape = ["batch", "heads", "length", "head_dim", "block", "dtype"]
    for numbers, some in table.groupby(shape, sort=False):
        lines += [
            "## " + ", ".join(f"{name} {value}" for name, value in zip(shape, numbers, strict=True)),
            "",
            "| case | density | GFLOP | GB by the model | GB from HBM | GB from L2 | ms |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for line in some.to_dict("records"):
            cells = (_cell(line[name]) for name in ("GFLOP", "model GB", "HBM GB", "L2 GB", "ms"))
            lines.append(f"| {line['case']} | {line['density']:.2%} | {' | '.join(cells)} |")
        lines.append("")
    lines += [
        "Forward and backward. GFLOP: products as performed, with what the backward computes again. By the model:",
        "without a cache, for programs of 64 queries or keys. From HBM, from L2: read and written by ncu's counters;",
        "- where it could not count. The model speaks of what is asked of L2, most of which the cache keeps from HBM.",
    ]
    reasons = sorted({row.reason for row in rows if row.reason})
    lines += ["", *(f"- not measured: {reason}" for reason in reasons)] if reasons else []
    return "\n".join(lines) + "\n"


def _cell(value: float | None) -> str:
    return "-" if value is None or pd.isna(value) else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Bytes and time of the forward over density, one line for each head dim; the model's bytes are dashed."""
    from matplotlib.figure import Figure

    sparse = [row for row in rows if row.case.kind == BUTTERFLY]
    dims = sorted({row.case.head_dim for row in sparse})
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    moved, taken = figure.subplots(1, 2)
    for number, dim in enumerate(dims):
        some = sorted((row for row in sparse if row.case.head_dim == dim), key=lambda row: row.density)
        density = [100 * row.density for row in some]
        color = f"C{number}"
        moved.plot(density, [row.cost.forward_bytes / GIGA for row in some], "--", color=color)
        for name, marker in (("forward_l2", "o"), ("forward_hbm", "x")):
            points = [(x, getattr(row, name)) for x, row in zip(density, some, strict=True)]
            points = [(x, y / GIGA) for x, y in points if y is not None]
            if points:
                moved.plot(*zip(*points, strict=True), marker, color=color)
        times = [(x, row.forward_ms) for x, row in zip(density, some, strict=True) if row.forward_ms is not None]
        standard = [row.forward_ms for row in rows if row.case.kind == STANDARD and row.case.head_dim == dim]
        beside = "".join(f" (standard attention {ms:.3g} ms)" for ms in standard if ms is not None)
        if times:
            taken.plot(*zip(*times, strict=True), "o-", color=color, label=f"D={dim}{beside}")
    for axes, what in ((moved, "GB read and written"), (taken, "ms")):
        axes.set(xlabel="live scores, %", ylabel=f"{what}, forward", ylim=(0, None), xlim=(0, None))
        axes.grid(alpha=0.3)
    moved.set_title("dashed: model; o: from L2; x: from HBM", fontsize=9)
    taken.set_title("butterfly", fontsize=9)
    if taken.get_legend_handles_labels()[0]:
        taken.legend(fontsize=8)
    figure.savefig(path, dpi=130)
