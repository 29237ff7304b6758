"""The results as rows, and the rows as `speed.csv`, `speed.md` and the short table at the end of a run."""

from __future__ import annotations

import csv
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

import torch

from experiments.speed.cases import BACKWARD, CALL, FORWARD, Case

OURS = "ours"
OK, WRONG, FAILED, SKIPPED, DIFFERS, NOT_RUN = "ok", "WRONG", "FAILED", "skipped", "DIFFERS", "not run"
WAYS = (FORWARD, BACKWARD)


@dataclass
class Row:
    """One case, one implementation, one pass. Numbers that do not exist are None.

    `ratio`: the peer's time over ours, above 1 ours is faster. `error`: of ours, in units of the yardstick of
    check.py, at most 1. `difference`: of a peer from ours, relative.
    """

    case: Case
    peer: str
    direction: str
    status: str
    density: float | None = None
    ms: float | None = None
    spread: float | None = None  # range of the rounds' medians over the median
    tflops: float | None = None  # useful TFLOP/s
    ratio: float | None = None
    first_call_s: float | None = None  # seconds, compilation included
    error: float | None = None
    difference: float | None = None
    reason: str = ""

    def columns(self) -> dict[str, object]:
        """The row of the CSV file."""
        case = self.case
        return {
            "case": case.name,
            "mask": case.kind,
            "batch": case.batch,
            "heads": case.heads,
            "length": case.length,
            "head_dim": case.head_dim,
            "dtype": str(case.dtype).removeprefix("torch."),
            "block": case.block,
            **{field.name: getattr(self, field.name) for field in fields(self) if field.name != "case"},
        }


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """All rows, one line each; floats to six digits."""
    with path.open("w", newline="") as file:
        lines = [row.columns() for row in rows]
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        for line in lines:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in line.items()})


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def environment(device: torch.device, command: str, commit: str | None) -> dict[str, str]:
    """What a reader needs to repeat the run."""
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "not installed"
    if commit is None:
        commit = _output_of("git", "rev-parse", "--short", "HEAD") or "not known"
        if commit != "not known" and _output_of("git", "status", "--porcelain"):
            commit += " with changes"
    facts = {"device": "CPU"}
    if device.type == "cuda":
        driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts = {
            "device": torch.cuda.get_device_name(device),
            "driver": driver.splitlines()[0] if driver else "not known",
            "cuDNN": str(torch.backends.cudnn.version()),
        }
    return {
        **facts,
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit,
        "command": command,
    }


def _cell(row: Row | None, *, ratio: bool, single_call: bool = False) -> str:
    if row is None or row.status == SKIPPED:
        return "-"
    if row.status != OK:
        return row.status
    if ratio:
        return "-" if row.ratio is None else f"{row.ratio:.2f}"
    if single_call:
        return f"{row.ms * 1e3:.1f}" if row.ms is not None else "-"
    return f"{row.ms:.3f} ({row.tflops:.0f})" if row.ms is not None and row.tflops is not None else "-"


def _peers(rows: Sequence[Row]) -> list[str]:
    shown = (row.peer for row in rows if row.peer != OURS and row.status != SKIPPED)
    return list(dict.fromkeys(shown))


def _error(rows: Sequence[Row | None]) -> str:
    errors = [row.error for row in rows if row is not None and row.error is not None]
    return f"{max(errors):.2f}" if errors else "-"  # of a NaN, the status speaks


def pass_table(rows: Sequence[Row]) -> list[list[str]]:
    """Header and one line a case: our milliseconds and TFLOP/s both ways, each peer's time over ours."""
    rows = [row for row in rows if row.direction in WAYS]
    peers = _peers(rows)
    found = {(row.case.name, row.peer, row.direction): row for row in rows}
    header = ["case", "density", "error", "ours forward", "ours backward"]
    table = [header + [f"{peer} {way}" for peer in peers for way in ("f", "b")]]
    for case in dict.fromkeys(row.case.name for row in rows):
        ours = [found.get((case, OURS, way)) for way in WAYS]
        density = next((row.density for row in ours if row is not None), None)
        line = [case, "-" if density is None else f"{density:.2%}", _error(ours)]
        line += [_cell(row, ratio=False) for row in ours]
        line += [_cell(found.get((case, peer, way)), ratio=True) for peer in peers for way in WAYS]
        table.append(line)
    return table


def call_table(rows: Sequence[Row]) -> list[list[str]]:
    """Header and one line a case: host microseconds of one inference call."""
    rows = [row for row in rows if row.direction == CALL]
    peers = _peers(rows)
    found = {(row.case.name, row.peer): row for row in rows}
    table = [["microseconds a call", "error", OURS, *peers]]
    for case in dict.fromkeys(row.case.name for row in rows):
        cells = [_cell(found.get((case, peer)), ratio=False, single_call=True) for peer in (OURS, *peers)]
        table.append([case, _error([found.get((case, OURS))]), *cells])
    return table


def remarks(rows: Sequence[Row]) -> list[str]:
    """The reasons of what was not timed, but for what a peer never serves; and our longest first calls."""
    lines = [
        f"{row.case.name}, {row.peer} {row.direction}: {row.status}: {row.reason}"
        for row in rows
        if row.status not in (OK, SKIPPED)
    ]
    for way in (CALL, *WAYS):
        seconds = [
            (row.first_call_s, row.case.name)
            for row in rows
            if row.peer == OURS and row.direction == way and row.first_call_s is not None
        ]
        if seconds:
            longest, case = max(seconds)
            lines.append(f"longest first {way} of ours, compilation included: {longest:.2f} s ({case})")
    return lines


def _plain(table: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = []
    for line in table:
        cells = [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _markdown(table: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in table[0][1:])]
    lines = [table[0], rule, *table[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


LEGEND = (
    "ours: milliseconds (useful TFLOP/s; dead scores count nothing). Peers, f forward and b backward: their "
    "time over ours, above 1 ours is faster. error: of ours against fp64, output and gradients, in units of "
    "the yardstick (at most 1 is right)."
)


def _tables(rows: Sequence[Row]) -> list[list[list[str]]]:
    return [table for table in (call_table(rows), pass_table(rows)) if len(table) > 1]


def short_table(rows: Sequence[Row]) -> str:
    """The tables and remarks in plain text."""
    return "\n\n".join([*(_plain(table) for table in _tables(rows)), "\n".join([LEGEND, *remarks(rows)])])


def write_markdown(rows: Sequence[Row], facts: dict[str, str], path: Path) -> None:
    """The tables and remarks with the facts of the run."""
    head = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    notes = "\n".join(f"- {line}" for line in remarks(rows))
    parts = ["# Speed", head, LEGEND, *(_markdown(table) for table in _tables(rows)), notes]
    path.write_text("\n\n".join(part for part in parts if part) + "\n")
