"""Checks attention with a mask against dense attention in fp64, on random tensors, and records what was found."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, NamedTuple

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from sparseflash import BlockMask, attention, testing
from sparseflash.attention import Backend
from sparseflash.cli.info import versions
from sparseflash.cli.inputs import DTYPES, drawn

ALLOWED = (
    "twice the largest error of dense attention computed plainly in the same dtype, plus about one unit in the last "
    "place of the largest value, both against fp64; errors are given as multiples of it, so at most 1 is exact"
)
_HEAD_DIMS, _DRAWS = (16, 64, 128), 3


class Case(NamedTuple):
    """The shape and dtype of the drawn inputs of one comparison."""

    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    seed: int


def cases_of(
    mask: BlockMask, heads: int, kv_heads: int | None, dtypes: list[str], head_dim: int, seed: int, *, thorough: bool
) -> list[Case]:
    """One case for each dtype; or, if thorough, with several head dims, with and without groups of heads, and for
    several draws.
    """
    heads = mask.shape[1] if mask.shape[1] > 1 else heads
    kv_heads = heads if kv_heads is None else kv_heads
    dims, groups, draws = {head_dim}, {kv_heads}, 1
    if thorough:
        dims, groups, draws = {*_HEAD_DIMS, head_dim}, {1, kv_heads, heads}, _DRAWS
    return [
        Case(dtype, dim, heads, key_heads, seed + more)
        for dtype in dtypes
        for dim in sorted(dims)
        for key_heads in sorted(groups)
        for more in range(draws)
    ]


def errors_of(mask: BlockMask, case: Case, backend: Backend | None = None) -> dict[str, float]:
    """The error of each result relative to the allowed error; at most 1 is exact."""
    dtype, seed = DTYPES[case.dtype], case.seed
    x = drawn(mask, batch=1, heads=case.heads, kv_heads=case.kv_heads, dim=case.head_dim, dtype=dtype, seed=seed)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, mask, return_lse=True, backend=backend)

    return testing.compare(ours, x.q, x.k, x.v, mask, dout=x.dout, dlse=x.dlse, seed=seed).ratios


def certificate(
    mask: BlockMask, found: list[tuple[Case, dict[str, float]]], backend: Backend | None, device: str
) -> dict[str, Any]:
    """The record as JSON has it."""
    properties = torch.cuda.get_device_properties(mask.device) if mask.device.type == "cuda" else None
    return {
        "exact": all(error <= 1 for _, errors in found for error in errors.values()),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "capability": None if properties is None else [properties.major, properties.minor],
        "versions": versions(),
        "backend": backend or ("triton" if properties is not None else "blockwise"),
        "tf32": mask.device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32",
        "mask": repr(mask),
        "digest": mask.digest,
        "allowed": ALLOWED,
        "cases": [{**case._asdict(), "errors": errors} for case, errors in found],
    }


def table(results: list[tuple[Case, dict[str, float]]], thorough: bool) -> Table:
    """The largest errors of each dtype, or of each dtype, head dim and number of key heads."""
    rows: dict[str, dict[str, float]] = {}
    for case, errors in results:
        label = f"{case.dtype}, D={case.head_dim}, {case.heads}:{case.kv_heads} heads" if thorough else case.dtype
        known = rows.setdefault(label, dict.fromkeys(errors, 0.0))
        rows[label] = {name: max(known[name], error) for name, error in errors.items()}
    made = Table()
    made.add_column("")
    for name in ("out", "lse", "dq", "dk", "dv"):
        made.add_column(name, justify="right")
    for label, errors in rows.items():
        made.add_row(label, *(Text(f"{error:.2f}", "" if error <= 1 else "bold red") for error in errors.values()))
    return made
