"""The versions of Triton that the kernels were measured with on a GPU, and the PyTorch releases that install each.

This is the only such list: the gate of the Hopper kernels (`gate.py`), the launcher, the documentation's table
(`docs/figures/versions.py`) and the tests of `pyproject.toml` and `constraints.txt` read it.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Measured(NamedTuple):
    """A version of Triton whose kernels were measured on a GPU."""

    triton: tuple[int, int]
    torch: tuple[str, ...]  # the PyTorch releases whose CUDA builds pin it


MEASURED = (
    Measured((3, 6), ("2.11",)),
    Measured((3, 7), ("2.12", "2.13")),
    Measured((3, 8), ("2.14",)),
    Measured((3, 9), ("2.15",)),
)


def is_measured(version: tuple[int, int]) -> bool:
    """Whether the kernels were measured with this major and minor version of Triton.

    >>> is_measured((3, 6)), is_measured((3, 99))
    (True, False)
    """
    return any(each.triton == version for each in MEASURED)


def named(versions: tuple[tuple[int, int], ...] | None = None) -> str:
    """Versions of Triton as text; by default the measured versions.

    >>> named(((3, 6), (3, 7)))
    '3.6 and 3.7'
    """
    found = [f"{major}.{minor}" for major, minor in versions or [each.triton for each in MEASURED]]
    return " and ".join(filter(None, [", ".join(found[:-1]), found[-1]]))


def releases() -> str:
    """The PyTorch releases whose builds for CUDA install a measured Triton, as text."""
    return f"{MEASURED[0].torch[0]} to {MEASURED[-1].torch[-1]}"


def triton_release() -> str:
    """The full version string of the installed Triton."""
    import triton  # late: this module must be importable without Triton

    return str(triton.__version__)


def triton_version() -> tuple[int, int]:
    """Major and minor version of the installed Triton."""
    found = re.match(r"(\d+)\.(\d+)", triton_release())
    return (int(found[1]), int(found[2])) if found else (0, 0)
