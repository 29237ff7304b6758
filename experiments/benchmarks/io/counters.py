"""The GPU's own byte counters, read by NVIDIA's `ncu` around one call in a separate process."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from experiments.benchmarks.io.cases import Case

ROOT = Path(__file__).resolve().parents[3]
_READ, _WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
# Sectors of 32 bytes that multiprocessors request from the L2 cache: the count that a model without a cache predicts.
_FROM_L2, _TO_L2 = "lts__t_sectors_op_read.sum", "lts__t_sectors_op_write.sum"
_SECTOR = 32
SECONDS = 120.0


class NoCountersError(RuntimeError):
    """Raised with the reason if counters are not available."""


@dataclass(frozen=True)
class Counted:
    """Bytes read and written by all kernels of a call."""

    hbm: float
    l2: float


def counted(case: Case, passes: str) -> Counted:
    """`passes`: "forward" or "both". Raises NoCountersError with the reason if `ncu` cannot count."""
    tool = shutil.which("ncu")
    if tool is None:
        raise NoCountersError("ncu is not installed")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            tool, "--profile-from-start", "off", "--target-processes", "all", "--cache-control", "none",
            "--clock-control", "none", "--metrics", ",".join((_READ, _WRITTEN, _FROM_L2, _TO_L2)), "--csv",
            "--page", "raw", "--print-units", "base", "--log-file", str(log),
            sys.executable, "-m", "experiments.benchmarks.io", "one", passes, *case.words(),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
        except subprocess.TimeoutExpired:
            raise NoCountersError(f"ncu took longer than {SECONDS:g} s") from None
        text = log.read_text() if log.exists() else ""
        if done.returncode:
            lines = [line for line in (done.stderr + text).splitlines() if line.strip()]
            raise NoCountersError(f"ncu failed: {lines[-1] if lines else done.returncode}")
        return parse(text)


def parse(text: str) -> Counted:
    """Sums over all kernels of ncu's raw page, which has a line of names, one of units, and one for each kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    if len(rows) < 2:
        raise NoCountersError("ncu saw no kernel")
    units, kernels = rows[0], rows[1:]
    if missing := [name for name in (_READ, _WRITTEN, _FROM_L2, _TO_L2) if name not in units]:
        raise NoCountersError(f"ncu does not count {', '.join(missing)} on this GPU")
    if units[_READ] != "byte" or units[_FROM_L2] != "sector":
        raise NoCountersError(f"ncu counts in {units[_READ]} and {units[_FROM_L2]}, not in byte and sector")

    def total(*names: str) -> float:
        return sum(float(kernel[name].replace(",", "")) for kernel in kernels for name in names)

    return Counted(total(_READ, _WRITTEN), _SECTOR * total(_FROM_L2, _TO_L2))
