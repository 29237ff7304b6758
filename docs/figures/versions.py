"""The pages' statements on versions of PyTorch and Triton, from `sparseflash/backends/triton/versions.py` and the runs
of `speed --quick`.
"""

from __future__ import annotations

from sparseflash.backends.triton.versions import MEASURED, named, releases

NAMES = "triton-versions/*/*/*"  # lease, case and head dim; times are compared within a lease


def sentence() -> str:
    """The sentence in README.md."""
    first, last = MEASURED[0].triton, MEASURED[-1].triton
    return (
        f"The Hopper kernels were timed with Triton {named((first,))} to {named((last,))}, which PyTorch {releases()} "
        f"install, always under PyTorch {MEASURED[0].torch[0]}. Under any other Triton, each Hopper kernel is tested "
        "before its first use."
    )


def rows() -> dict[str, str]:
    """The first three cells of each row of the FAQ's table, and the way that its figures have in the store."""
    return {
        f"{named((each.triton,))} | {', '.join(each.torch)} | Hopper": f"triton-{named((each.triton,))}"
        for each in MEASURED
    }


CORNER = "Triton | PyTorch for CUDA that installs it | kernels on compute capability 9.0"
OTHERS = "| others | | Hopper, after a check | not measured | not measured |"
CELL = f"{NAMES}/{{column}}/triton-{named((MEASURED[0].triton,))} / {NAMES}/{{column}}/{{row}}"
