"""The same kernels compiled under several versions of Triton: what no test of the installed version can see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from experiments.benchmarks.compile import hopper
from experiments.benchmarks.compile.report import launched
from experiments.benchmarks.compile.resources import disassembled, said_by_ptxas
from experiments.training.atomic_files import write_csv

CACHE = Path("~/.cache/sparseflash").expanduser()
_PORTABLE: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("bfloat16", 64, {"descriptors": True}), ("bfloat16", 128, {"lengths": True}), ("float32", 64, {}),
    ("float16", 96, {"dropout": True}), ("bfloat16", 64, {"split": True}),
    ("bfloat16", 64, {"gathered": True, "block": 32}),
)  # fmt: skip
# Head dims of queries and keys, and of values, and features.
_HOPPER = (
    (64, 64, ""), (128, 128, ""), (128, 128, "lengths parts"), (128, 128, "small"), (64, 64, "softcap"),
    (128, 128, "alibi learned"), (128, 128, "table learned"), (128, 128, "key_bias learned"),
    (128, 128, "bias learned"), (64, 64, "tile_bias learned dead"), (80, 80, ""), (192, 128, ""), (256, 256, ""),
    (64, 64, "small spread"), (128, 128, "small spread"),
)  # fmt: skip
COLUMNS = ("instructions", "registers", "spilled", "shared", "serialised")
_NOTABLE = 0.03  # a relative difference of instructions
Numbers = Mapping[str, int]


def rows() -> Iterator[tuple[str, Numbers]]:
    for arithmetic, dim, options in _PORTABLE:
        with_ = " ".join(name for name, value in options.items() if value is True)
        for name, kernel in launched(hopper.ARCH, arithmetic, dim, **options):
            yield f"portable {arithmetic} D={dim} {with_} {name}", _numbers(kernel)
    for dim, v_dim, features in _HOPPER:
        for name, (kernel, _) in hopper.compiled(dim, torch.bfloat16, features.split(), v_dim).items():
            yield f"hopper D={dim}/{v_dim} {features} {name}", _numbers(kernel)


def _numbers(kernel: Any) -> Numbers:
    said, cubin = said_by_ptxas(kernel)
    (instructions,) = disassembled([cubin], hopper.ARCH)
    found = len(instructions), said.registers, said.spilled, kernel.metadata.shared, int(bool(said.serialised))
    return dict(zip(COLUMNS, found, strict=True))


def compiled_with(triton: str) -> tuple[str, dict[str, Numbers]]:
    """triton: a version as "3.6", which pip installs into a cache, or a folder with one."""
    paths = [str(_folder_of(triton)), str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "experiments.benchmarks.compile", "versions", "--here"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the kernels must compile with Triton {triton}; they do not, see above")
    version, *found = (json.loads(line) for line in done.stdout.splitlines() if line.startswith(('["', '"')))
    return version, dict(found)


def _folder_of(triton: str) -> Path:
    given = Path(triton).expanduser()
    if (given / "triton").is_dir():
        return given.resolve()
    folder = CACHE / f"triton-{triton}"
    if not (folder / "triton").is_dir():
        print(f"pip installs Triton {triton} into {folder}, which takes up to 900 MB.", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        done = subprocess.run([*command, f"triton=={triton}.*"], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(
                f"--triton must be a version that pip can install for this Python, or a folder with one; got {triton}; "
                f"pip says: {done.stderr.strip().splitlines()[-1]}"
            )
    return folder


def compared(found: Mapping[str, Mapping[str, Numbers]]) -> Table:
    """A table of the kernels that differ between versions; numbers by version, in the order of `found`."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("kernel", *COLUMNS):
        table.add_column(column, no_wrap=True)
    for name in dict.fromkeys(name for numbers in found.values() for name in numbers):
        each = [numbers.get(name) for numbers in found.values()]
        if differs(each):
            texts = [["-" if row is None else f"{row[column]:,}" for row in each] for column in COLUMNS]
            table.add_row(name, *(text[0] if len(set(text)) == 1 else " / ".join(text) for text in texts))
    return table


def differs(each: Sequence[Numbers | None]) -> bool:
    """Whether a kernel is missing somewhere, or differs by more than a few instructions.

    >>> row = dict(zip(COLUMNS, (1000, 168, 0, 4096, 0)))
    >>> differs([row, row | {"instructions": 1020}]), differs([row, row | {"spilled": 8}]), differs([row, None])
    (False, True, True)
    """
    there = [row for row in each if row is not None]
    counts = [row["instructions"] for row in there]
    return (
        len(there) < len(each)
        or max(counts) > (1 + _NOTABLE) * min(counts)
        or any(len({row[name] for row in there}) > 1 for name in ("spilled", "shared", "serialised"))
    )


def write(path: Path, found: Mapping[str, Mapping[str, Numbers]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_csv(
        path, [{"triton": v, "kernel": name, **row} for v, numbers in found.items() for name, row in numbers.items()]
    )
