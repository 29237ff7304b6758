"""`python -m docs.versions` prints the sentence and the table about PyTorch and Triton versions that the pages contain.

Both are made from `sparseflash/backends/triton/versions.py` and the stored runs. After a change of either, copy the
output into the pages; a test compares them.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from statistics import median

import experiments
from sparseflash.backends.triton.versions import MEASURED, named, releases

RUNS = "speed/triton-versions/speed.csv"  # `speed --quick` under each version, in the folder of results
OURS = "ours"  # the kernels that `attention` chooses; the file also has rows for the portable kernels


def sentence() -> str:
    """The sentence in README.md and the tutorial."""
    first, last = MEASURED[0].triton, MEASURED[-1].triton
    return (
        f"The Hopper kernels were measured with Triton {named((first,))} to {named((last,))}, the versions that "
        f"PyTorch {releases()} for CUDA installs; under a newer Triton they are checked before their first use."
    )


def table() -> str:
    """The table of the FAQ."""
    lines = [
        "| Triton | PyTorch for CUDA that installs it | kernels on compute capability 9.0 | forward | backward |",
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
    """Speed of our kernels relative to the first measured version in the same GPU lease: one number per case, by
    version and direction.
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
