from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from experiments.lm.bench import Row
from experiments.training.atomic_files import write_csv, write_json

PEER = "sdpa"


def table(rows: Sequence[Row]) -> Table:
    """ "x" is tokens/s divided by dense SDPA's in the same model and context."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("model", "context", "pattern", "attention"):
        made.add_column(name, no_wrap=True, overflow="fold")
    for name in ("tokens/s", "x SDPA", "MFU", "GB", "ms/step", "±"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        case = row.case
        numbers: Sequence[str] = (shortened(row.failure), "", "", "", "", "")
        if row.rounds:
            ratio = over_sdpa(row, rows)
            numbers = (
                f"{row.tokens_per_s:,.0f}",
                "" if ratio is None else f"{ratio:.2f}",
                "" if row.mfu is None else f"{row.mfu:.1%}",
                f"{row.peak_bytes / 1e9:.1f}" if row.peak_bytes else "",
                f"{row.seconds * 1e3:,.1f}",
                f"{row.spread:.1%}",
            )
        made.add_row(case.preset, f"{case.context:,}", case.pattern, case.implementation, *numbers)
    return made


def shortened(failure: str) -> str:
    """For the table; bench.json has the whole text.

    >>> shortened("NotImplementedError: FlexAttention does not support backward on CPU.")
    'failed'
    """
    return failure if failure in ("out of memory", "out of time") else "failed"


def over_sdpa(row: Row, rows: Sequence[Row]) -> float | None:
    for other in rows:
        if other.rounds and other.case == row.case._replace(pattern="dense", attention=PEER):
            return row.tokens_per_s / other.tokens_per_s
    return None


def as_record(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    ratio = over_sdpa(row, rows)
    measured = bool(row.rounds)
    return {
        **row.case._asdict(),
        "parameters": row.parameters,
        "density": row.density,
        "batch": row.batch,
        "part": row.part,
        "tokens_per_s": row.tokens_per_s if measured else None,
        "over_sdpa": ratio if measured else None,
        "mfu": row.mfu,
        "flops_a_token": row.flops_a_token,
        "step_ms": row.seconds * 1e3 if measured else None,
        "spread": row.spread if measured else None,
        "rounds": len(row.rounds),
        "peak_gb": row.peak_bytes / 1e9 if row.peak_bytes else None,
        "first_seconds": row.first_seconds,
        "failure": row.failure,
    }


def write(folder: Path, rows: Sequence[Row], facts: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    records = [as_record(row, rows) for row in rows]
    write_csv(folder / "bench.csv", [{**record, **facts} for record in records])
    kernels = [
        {**row.case._asdict(), "kernel": each.name, "ms": f"{each.ms:.4f}", "calls": f"{each.calls:g}"}
        for row in rows
        for each in row.kernels
    ]
    if kernels:
        write_csv(folder / "kernels.csv", kernels)
    plain = [{name: None if value != value else value for name, value in record.items()} for record in records]
    write_json(folder / "bench.json", {"environment": dict(facts), "settings": dict(settings), "rows": plain})
