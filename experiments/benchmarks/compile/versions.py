"""Compiles the same kernels under other versions of Triton, and compares the results."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from rich import box
from rich.table import Table

VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")  # the versions of PyTorch 2.11, 2.13, 2.14 and 2.15
CACHE = Path("~/.cache/sparseflash")
# A relative difference in the number of instructions above this is shown.
_NOTABLE = 0.03


def folder_of(triton: str, cache: Path) -> Path:
    """The folder of a Triton: `triton` if it is a folder, the folder of the installed version, or a folder in `cache`.

    pip installs a missing version into `cache`. Raises RuntimeError if pip fails.
    """
    installed = find_spec("triton")
    if installed is not None and installed.origin is not None and version("triton") == triton:
        return Path(installed.origin).parent.parent
    given = Path(triton).expanduser()
    if (given / "triton" / "__init__.py").exists():
        return given.resolve()
    folder = cache.expanduser().resolve() / f"triton-{triton}"
    if (folder / "triton" / "__init__.py").exists():
        return folder
    print(f"pip installs Triton {triton} into {folder}, which takes up to 900 MB.", file=sys.stderr)
    target = ["--target", str(folder), "--no-deps", "--no-compile", f"triton=={triton}"]
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *target], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"--triton must be a version that pip can install for this Python, or a folder with one; got "
            f"{triton}; pip says: {done.stderr.strip().splitlines()[-1]}"
        )
    return folder


def run_with(folder: Path, *words: str) -> None:
    """Runs `python -m experiments.benchmarks.compile ...` with the Triton of a folder.

    Raises RuntimeError if it fails.
    """
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "experiments.benchmarks.compile", *words]
    if subprocess.run(command, env=environment).returncode != 0:
        raise RuntimeError(f"the kernels must compile with the Triton of {folder}; it failed, see above")


def version_in(folder: Path) -> str:
    """The version of the Triton in a folder.

    It is read from the source, because importing one Triton rules out others in this process.
    """
    for line in (folder / "triton" / "__init__.py").read_text().splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "__version__":
            return value.strip().strip("'\"")
    raise RuntimeError(f"{folder} must hold a Triton that sets __version__; found none")


def compared(found: Mapping[str, Mapping[tuple, Mapping[str, int]]], *, every: bool = False) -> Table:
    """A table of kernels by version: instructions, registers, spilled bytes and shared memory.

    found: by version, the numbers by kernel. every: also show kernels that are the same in all versions.
    """
    versions = list(found)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("arch", "family", "kernel", "arithmetic", "D", "with"):
        table.add_column(column, no_wrap=True)
    for what in ("instructions", "registers", "spilled", "shared"):
        table.add_column(f"{what}\n{' / '.join(versions)}", justify="right", no_wrap=True)
    for which in sorted({each for numbers in found.values() for each in numbers}):
        rows = [found[version].get(which) for version in versions]
        if every or differs(rows):
            table.add_row(
                *map(str, which), *(_each(rows, what) for what in ("instructions", "registers", "spilled", "shared"))
            )
    return table


def differs(rows: Sequence[Mapping[str, int] | None]) -> bool:
    """Whether a kernel differs between versions by more than a few instructions.

    >>> row = {"instructions": 1000, "registers": 168, "spilled": 0, "shared": 4096, "serialised": 0}
    >>> differs([row, row | {"instructions": 1020}, None]), differs([row, row | {"spilled": 8}])
    (False, True)
    """
    there = [row for row in rows if row is not None]
    if not there:
        return False
    counts = [row["instructions"] for row in there]
    if max(counts) > (1 + _NOTABLE) * min(counts):
        return True
    return any(len({row[name] for row in there}) > 1 for name in ("spilled", "shared", "serialised"))


def _each(rows: Sequence[Mapping[str, int] | None], what: str) -> str:
    """The numbers of all versions, or a single number if all are equal."""
    texts = ["-" if row is None else f"{row[what]:,}" for row in rows]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)
