"""Relative position tables in the form that the Hopper kernels read: by distance, in the units of their scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.changes.table import in_dtype
from sparseflash.backends.triton.hopper.rows import finite_product
from sparseflash.backends.triton.hopper.scores import MARGIN
from sparseflash.backends.triton.launch.examples import like, one_number_of
from sparseflash.backends.triton.launch.launches import launch_of
from sparseflash.backends.triton.launcher import BoundLaunch
from sparseflash.scores.change import Scores

_BLOCK = 1024  # codes of a program of `entries_kernel`


@triton.jit(do_not_specialize=["inverse_unit", "codes", "table_size", "programs_of_head"])
def entries_kernel(
    table_ptr, buckets_ptr,  # [Hq, R] contiguous; int32 [C]
    entries_ptr, inside_ptr,  # fp32 [Hq, MARGIN + C + MARGIN], int32 [C], written
    inverse_unit, codes, table_size, programs_of_head,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the entry of every code, 0 where there is no code, and the bucket of every code.

    A bucket outside the table raises an error where the check does not wait for the device. Elsewhere it becomes the
    nearest bucket, so that no kernel reads or adds past the table.
    """
    head, number = tl.program_id(0) // programs_of_head, tl.program_id(0) % programs_of_head
    place = number * BLOCK + tl.arange(0, BLOCK)
    code = place - MARGIN
    is_code = (code >= 0) & (code < codes)
    bucket = tl.load(buckets_ptr + code, mask=is_code, other=0)
    bucket = tl.minimum(tl.maximum(bucket, 0), table_size - 1)
    tl.store(inside_ptr + code, bucket, mask=is_code & (head == 0))
    entry = tl.load(table_ptr + (tl.cast(head, tl.int64) * table_size + bucket), mask=is_code, other=0.0)
    size = codes + 2 * MARGIN
    target = entries_ptr + (tl.cast(head, tl.int64) * size + place)
    tl.store(target, finite_product(entry.to(tl.float32), inverse_unit), mask=place < size)


class Entries:
    """A table as the kernels read it, prepared for tensors of one layout."""

    def __init__(self, changes: Scores, q: Tensor, inverse_unit: float, device: torch.device) -> None:
        # Rounded as for the portable kernels: they may run the other pass, which must see the same scores.
        self._dtype = q.dtype
        table, buckets, until = (like(x) for x in table_of(changes, self._dtype).values())
        (heads, self.size), codes = table.shape, len(buckets)
        self.buckets = buckets
        entries = torch.empty(heads, codes + 2 * MARGIN.value, dtype=torch.float32, device="meta")
        self._entries, self._inside = one_number_of(entries, device), one_number_of(buckets, device)
        programs = -(-entries.shape[1] // _BLOCK)
        numbers = {"inverse_unit": inverse_unit, "codes": codes, "table_size": self.size, "programs_of_head": programs}
        examples = {"table_ptr": table, "buckets_ptr": buckets, "entries_ptr": entries, "inside_ptr": buckets}
        self.launch: BoundLaunch = launch_of(
            entries_kernel, {"BLOCK": _BLOCK}, numbers, examples, device, {}, bound=(), num_warps=4, num_stages=1
        ).bind(heads * programs)
        self.examples = {"entries_ptr": entries, "until_ptr": until}

    def __call__(self, changes: Scores) -> dict[str, Tensor]:
        """The kernels' arguments for one call."""
        given = {
            **table_of(changes, self._dtype), "entries_ptr": torch.empty_like(self._entries),
            "inside_ptr": torch.empty_like(self._inside),
        }  # fmt: skip
        self.launch(given)
        return {name: given[name] for name in ("entries_ptr", "until_ptr")} | {"buckets_ptr": given["inside_ptr"]}


def table_of(changes: Scores, dtype: torch.dtype) -> dict[str, Tensor]:
    """The relative position table in this dtype, its buckets and their runs."""
    found = changes.find("relative")
    given = {"table_ptr": in_dtype(found.table, dtype), "buckets_ptr": found.buckets, "until_ptr": found.until}
    return {name: aligned_start(x.contiguous()) for name, x in given.items()}


def entries_of(changes: Scores | None, q: Tensor, inverse_unit: float, device: torch.device) -> Entries | None:
    """The prepared table, or None if the score modifications have none."""
    return None if changes is None or changes.find("relative") is None else Entries(changes, q, inverse_unit, device)
