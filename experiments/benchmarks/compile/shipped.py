"""Compiles every shipped configuration with the installed Triton: the resources and instructions of each kernel."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.benchmarks.compile import hopper
from experiments.benchmarks.compile.report import TOKENS, launched
from experiments.benchmarks.compile.resources import resources_of
from experiments.training.atomic_files import write_csv
from sparseflash import masks, scores
from sparseflash.backends.triton.hopper.configs import BLOCK, HEAD_DIMS, config_for
from sparseflash.scores.change import Scores

FAMILIES = ("hopper", "portable")
ARCHS = (80, 89, 90, 100)
_DIMS = (32, 64, 128, 256)  # the head dims of the tables of configurations
_ARITHMETIC = ("bfloat16", "tf32", "float32")
# Instructions that tell kernels apart: products, masks kept as predicates, exchanges, spills and loads.
OPCODES = (
    "HGMMA", "HMMA", "UTCHMMA", "MUFU", "FFMA", "FMUL", "FADD", "FSEL", "ISETP", "LOP3", "PLOP3", "P2R", "R2P", "SHFL",
    "LDL", "STL", "LDG", "LDS", "LDSM", "STS", "BAR",
)  # fmt: skip
# Further features with configurations in the tables.
_MORE = ("lengths", "block 64", "bias", "tile_bias", "table")
_HOPPER = (
    "", "lengths", "parts", "lengths parts", "small", "softcap", "alibi", "alibi learned", "sink", "table",
    "table learned", "key_bias", "key_bias learned", "bias", "bias learned", "tile_bias", "tile_bias learned dead",
    "small lengths parts",
)  # fmt: skip


_MERGING = ("combine_rows_kernel", "combine_gradients_kernel")  # small kernels without matrix products


class Kernel(NamedTuple):
    """What identifies a kernel."""

    arch: int
    family: str
    kernel: str
    arithmetic: str
    dim: int
    features: str


class Group(NamedTuple):
    """The kernels of a forward and a backward, which are compiled together."""

    arch: int
    family: str
    arithmetic: str
    dim: int
    features: str


def groups(archs: Sequence[int], families: Sequence[str]) -> list[Group]:
    """All configurations that are shipped for these GPUs."""
    found = []
    if "hopper" in families and hopper.ARCH in archs:
        dims = sorted({config_for(dim, BLOCK).dim for dim in HEAD_DIMS})
        found += [Group(hopper.ARCH, "hopper", "bfloat16", dim, each) for dim in dims for each in _HOPPER]
    if "portable" in families:
        found += [group for arch in archs for group in _portable(arch)]
    return found


def _portable(arch: int) -> Iterator[Group]:
    for arithmetic in _ARITHMETIC:
        for dim in _DIMS:
            if arch == 89 and dim < 256:  # the same configurations as on 8.0
                continue
            for loads in ("descriptors", "pointers") if arch >= 90 else ("pointers",):
                more = _MORE if arithmetic == "bfloat16" and dim in (64, 128) else ()
                for features in ("", *more):
                    yield Group(arch, "portable", arithmetic, dim, f"{loads} {features}".strip())


def compiled(group: Group) -> list[dict[str, Any]]:
    """A row for each kernel of a group."""
    if group.family == "hopper":
        made = hopper.compiled(group.dim, getattr(torch, group.arithmetic), group.features.split())
        kernels = [(name, kernel) for name, (kernel, _) in made.items() if name not in _MERGING]
    else:
        loads, _, features = group.features.partition(" ")
        kernels = launched(
            group.arch, group.arithmetic, group.dim, descriptors=loads == "descriptors", lengths=features == "lengths",
            block=64 if features == "block 64" else 128, changes=_changes(features),
        )  # fmt: skip
    rows = []
    names = Counter[str]()
    for name, kernel in kernels:
        names[name] += 1  # in fp32, dq runs twice: it finds delta first
        which = f"{name.removesuffix('_kernel')}{f' {names[name]}' if names[name] > 1 else ''}"
        rows.append(_row(group, which, kernel))
    return rows


def _changes(kind: str) -> Scores | None:
    if kind == "bias":
        return Scores((scores.bias(torch.ones(1, 2, TOKENS, TOKENS, dtype=torch.bfloat16)),))
    if kind == "tile_bias":
        mask = masks.causal(TOKENS)
        values = torch.ones(1, 2, len(mask.indices), mask.block_q, mask.block_k, dtype=torch.bfloat16)
        return Scores((scores.tile_bias(values, mask),))
    if kind == "table":
        return Scores((scores.relative(torch.ones(2, 32), scores.t5_buckets()),))
    return None


def _row(group: Group, name: str, kernel: Any) -> dict[str, Any]:
    used = resources_of(kernel)
    options = kernel.metadata
    which = Kernel(group.arch, group.family, name, group.arithmetic, group.dim, group.features)
    return {
        **which._asdict(), "warps": options.num_warps, "stages": options.num_stages, "registers": used.said.registers,
        "spilled": used.said.spilled, "shared": used.shared, "serialised": int(bool(used.said.serialised)),
        "instructions": used.instructions, **{opcode: used.opcodes.get(opcode, 0) for opcode in OPCODES},
    }  # fmt: skip


def read(path: Path) -> dict[Kernel, dict[str, int]]:
    """The numbers of each kernel in a file; empty if the file does not exist."""
    if not path.exists():
        return {}
    with path.open() as file:
        rows = list(csv.DictReader(file))
    found = {}
    for row in rows:
        which = Kernel(*(int(row[name]) if name in ("arch", "dim") else row[name] for name in Kernel._fields))
        found[which] = {name: int(x) for name, x in row.items() if name not in Kernel._fields}
    return found


def write(path: Path, found: Mapping[Kernel, Mapping[str, int]]) -> None:
    """Writes a file, sorted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_csv(path, [{**which._asdict(), **found[which]} for which in sorted(found)])
