"""What kernels use when compiled, from the CSV files of `experiments.benchmarks compile` in the store."""

from __future__ import annotations

import csv
from pathlib import Path

from docs.figures.store import RESULTS


def fits(results: Path = RESULTS) -> str:
    """A sentence on the newest file of `tests.fitting`."""
    path = max((results / "compile").glob("fits-triton-*.csv"))
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    fewer = sum(int(row["stages"]) < int(row["config"].split("x")[3].rstrip("q")) for row in rows)
    cases = len({row["case"] for row in rows})
    return f"All {len(rows)} kernels of {cases} cases fit, {fewer} of them with fewer pipeline stages than chosen."


def forwards(results: Path = RESULTS) -> str:
    """A table of the Hopper forwards: instructions and spilled bytes of a thread, by version of Triton."""
    found = _versions(results)
    versions = list(found)
    lines = [
        f"| Hopper forward, bf16 | {' | '.join(f'Triton {each}' for each in versions)} |",
        "|---" * (1 + len(versions)) + "|",
    ]
    for name in found[versions[0]]:
        if name.startswith("hopper") and name.endswith(" forward_kernel"):
            cells = [
                f"{int(row['instructions']):,}, {row['spilled']}" for row in (found[each][name] for each in versions)
            ]
            label = " ".join(name.removeprefix("hopper ").removesuffix("forward_kernel").split())
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spills(results: Path = RESULTS) -> str:
    """A sentence on the Hopper backwards with learned score modifications, which differ most between versions."""
    ranges = []
    for version, rows in _versions(results).items():
        bytes_ = [
            int(row["spilled"])
            for name, row in rows.items()
            if name.startswith("hopper") and "learned" in name and name.endswith(" backward_kernel")
        ]
        ranges.append(f"{min(bytes_)} to {max(bytes_)} bytes a thread under Triton {version}")
    return f"The Hopper backwards with learned score modifications spill {', '.join(ranges)}."


def _versions(results: Path) -> dict[str, dict[str, dict[str, str]]]:
    found: dict[str, dict[str, dict[str, str]]] = {}
    with (results / "compile" / "versions.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["triton"], {})[row["kernel"]] = row
    return found
