"""`python -m docs.versions`: what the pages say of PyTorch and Triton, from `sparseflash/backends/triton/versions.py`.

A test compares the pages with it. After a change of that list or of the stored runs, put what this prints in their
place.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from statistics import median

import experiments
from sparseflash.backends.triton.versions import MEASURED, named, releases

RUNS = "speed/triton-versions/speed.csv"  # `speed --quick` under each version, in the folder of results
OURS = "ours"  # the kernels that `attention` chooses; there are rows of the portable ones, too


def sentence() -> str:
    """What README.md and the tutorial say."""
    first, last = MEASURED[0].triton, MEASURED[-1].triton
    return (
        f"The kernels for Hopper were measured with Triton {named((first,))} to {named((last,))}, which PyTorch "
        f"{releases()} for CUDA bring; with a newer Triton they are checked before they serve."
    )


def table() -> str:
    """The table of the FAQ."""
    lines = [
        "| Triton | PyTorch for CUDA that brings it | kernels on compute capability 9.0 | forward | backward |",
        "|---|---|---|---|---|",
    ]
    speeds = relative_speeds()
    for each in MEASURED:
        name = named((each.triton,))
        forward, backward = (
            "1" if each is MEASURED[0] else f"{min(found):.2f} to {max(found):.2f}"
            for found in (speeds[name, direction] for direction in ("forward", "backward"))
        )
        lines.append(f"| {name} | {', '.join(each.torch)} | Hopper | {forward} | {backward} |")
    lines.append("| others | | Hopper, after a check | not measured | not measured |")
    return "\n".join(lines)


def relative_speeds() -> dict[tuple[str, str], list[float]]:
    """The speed of our kernels over that under the first measured version, in the same lease of a GPU: a number for
    each case, by version and direction.
    """
    runs = defaultdict(list)
    with (Path(experiments.__file__).parent / "results" / RUNS).open(newline="") as file:
        for row in csv.DictReader(file):
            if row["peer"] == OURS and row["tree"] == "after":
                version = ".".join(row["triton"].split(".")[:2])
                runs[row["lease"], row["case"], row["direction"], version].append(float(row["tflops"]))
    first, found = named((MEASURED[0].triton,)), defaultdict(list)
    for (lease, case, direction, version), speeds in runs.items():
        found[version, direction].append(median(speeds) / median(runs[lease, case, direction, first]))
    return found


if __name__ == "__main__":
    print(sentence(), table(), sep="\n\n")
