"""A relative position table in the Hopper kernels.

At every call a kernel expands the table to an entry for each distance, in the units of scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.changes.hopper import Given, HopperKind, HopperRequest
from sparseflash.backends.triton.changes.table import in_dtype
from sparseflash.backends.triton.hopper import configs
from sparseflash.backends.triton.hopper.record import FIRST_Q, HEAD, field, received
from sparseflash.backends.triton.hopper.record import OF_CHANGE_FIRST as FIRST_ENTRY
from sparseflash.backends.triton.hopper.record import OF_CHANGE_SECOND as LAST_ENTRY
from sparseflash.backends.triton.hopper.rows import finite_product
from sparseflash.backends.triton.hopper.scores import (
    MARGIN,
    as_float,
    entries_of_head,
    entries_of_scores,
    outer_runs,
    outer_tiles,
    read_later,
    shared_entry,
)
from sparseflash.backends.triton.hopper.table_sums import TABLE_SUMS, add_by_distance, add_to_bucket, sums_of_two_rows
from sparseflash.backends.triton.launch.launches import launch_of, like, one_number_of
from sparseflash.backends.triton.launcher import BoundLaunch

if TYPE_CHECKING:
    from sparseflash.backends.triton.hopper.learned import HopperCall

ROWS = gl.constexpr(configs.ROWS)  # of a warpgroup of the forward
KEYS = gl.constexpr(configs.BLOCK[1])  # of an item of the backward
MOST_HEADS = gl.constexpr(1 << 16)
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


# ---------------------------------------------------------------------- the forward


@gluon.jit
def hopper_record(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, record, number, head, q_len, k_len):
    """Writes the entries of the first and of the last distance to the record of an item."""
    tensors, _, _, _ = args
    here_ptr = entries_of_head(tensors[0], head, q_len, k_len - q_len)
    first_entry, last_entry = gl.load(here_ptr + (1 - q_len)), gl.load(here_ptr + (k_len - 1))
    record = gl.where(number == FIRST_ENTRY, gl.cast(first_entry, gl.int32, bitcast=True), record)
    return gl.where(number == LAST_ENTRY, gl.cast(last_entry, gl.int32, bitcast=True), record)


@gluon.jit
def hopper_no_item(CHANGES: gl.constexpr, NUMBER: gl.constexpr):
    return 0, 0


@gluon.jit
def hopper_begin_item(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, item, C: gl.constexpr, BLOCK_N: gl.constexpr):
    tensors, _, _, _ = args
    record_s, turn, q_len, offset, _ = item
    return outer_tiles(
        outer_runs(tensors[1], q_len, offset), field(record_s, turn, FIRST_Q) + (C * ROWS + offset),
        as_float(field(record_s, turn, FIRST_ENTRY)), as_float(field(record_s, turn, LAST_ENTRY)), ROWS, BLOCK_N,
    )  # fmt: skip


@gluon.jit
def hopper_begin_tile(
    CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, of_item, block, item, C: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """`(entry, whether all scores of the tile share it, whether it is the last distance's, whether the first's)`."""
    tensors, _, _, _ = args
    record_s, turn, q_len, offset, _ = item
    past_until, future_from = of_item
    entry = 0.0
    is_past, is_future = block * BLOCK_N <= past_until, block * BLOCK_N >= future_from
    is_shared = is_past | is_future
    if not is_shared:
        ahead = field(record_s, turn, FIRST_Q) + (C * ROWS + offset) - block * BLOCK_N
        here_ptr = entries_of_head(tensors[0], field(record_s, turn, HEAD), q_len, offset)
        runs = outer_runs(tensors[1], q_len, offset)
        _at, entry, is_shared = shared_entry(runs, here_ptr, ahead - (BLOCK_N - 1), ahead + (ROWS - 1))
    return (entry, is_shared, is_past, is_future), not is_shared


@gluon.jit
def hopper_apply_masked(
    CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, s, of_tile, block, item, C: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    tensors, _, _, _ = args
    record_s, turn, q_len, offset, _ = item
    if not of_tile[1]:
        ahead = field(record_s, turn, FIRST_Q) + (C * ROWS + offset) - block * BLOCK_N
        here_ptr = entries_of_head(tensors[0], field(record_s, turn, HEAD), q_len, offset)
        s = s + entries_of_scores(here_ptr, ahead, 1, s)
    return s


@gluon.jit
def hopper_of_rows(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, s, of_tile, item, BLOCK_N: gl.constexpr):
    record_s, turn, _, _, _ = item
    entry, _, is_past, is_future = of_tile
    first, last = field(record_s, turn, FIRST_ENTRY), field(record_s, turn, LAST_ENTRY)
    return s, gl.where(is_past | is_future, as_float(gl.where(is_past, last, first)), entry)


# ---------------------------------------------------------------------- the backward


@gluon.jit
def hopper_begin(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, of_tokens):
    tensors, _, _, _, _, _ = args
    _, q_len, offset = of_tokens
    return outer_runs(tensors[1], q_len, offset)


@gluon.jit
def hopper_send(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, runs, place, of_tokens, ROWS: gl.constexpr):
    """Four numbers for the warpgroups:

    - by how many tokens the first key comes after the first query; with gradients, if all scores share an entry, its
      bucket instead
    - whether all scores share an entry
    - the bits of this entry, or 0
    - the head, plus its number in the group times MOST_HEADS
    """
    tensors, _, _, _, _, _ = args
    _, q_len, offset = of_tokens
    _, head, member, first_q, first_k = place
    ahead = first_k - (first_q + offset)
    here_ptr = entries_of_head(tensors[0], head, q_len, offset)
    at, entry, is_shared = shared_entry(runs, here_ptr, 1 - KEYS - ahead, ROWS - 1 - ahead)
    if CHANGES.ARE_LEARNED[NUMBER]:
        ahead = gl.where(is_shared, gl.load(tensors[2] + (at + q_len - 1)), ahead)
    shares = gl.where(is_shared, 1, 0)
    return (ahead, shares, gl.cast(entry, gl.int32, bitcast=True), head + member * MOST_HEADS), ()


@gluon.jit
def hopper_receive(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, step, no_scores):
    """The first three numbers of `hopper_send`, as an integer, a bool and a float."""
    ahead, is_shared = received(CHANGES, NUMBER, step, 0), received(CHANGES, NUMBER, step, 1) != 0
    return ahead, is_shared, as_float(received(CHANGES, NUMBER, step, 2))


@gluon.jit
def hopper_apply(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, buffers, s, of_tile, step):
    tensors, _, _, _, _, _ = args
    ahead, is_shared, _ = of_tile
    if not is_shared:
        _, _, _, of_tokens = step
        _, q_len, offset = of_tokens
        head = received(CHANGES, NUMBER, step, 3) % MOST_HEADS
        here_ptr = entries_of_head(tensors[0], head, q_len, offset)
        s = s + entries_of_scores(here_ptr, ahead, -1, s)
    return s


@gluon.jit
def hopper_of_keys(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, s, of_tile, qk_scale):
    """The entry that the scores of the tile share, or 0; the kernel adds it to the exponents."""
    return s, of_tile[2] * qk_scale, of_tile


@gluon.jit
def hopper_start(CHANGES: gl.constexpr, NUMBER: gl.constexpr, no_scores):
    """`(sums over the latest tiles, all scores of which have one entry; the index of its bucket, -1 for none)`."""
    return sums_of_two_rows(no_scores), -1


@gluon.jit
def hopper_gradient_later(
    CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, sums, half_ds, of_tile, step, place, no_sums
):  # fmt: skip
    """Adds the gradients of a tile's scores: to the sums if the scores share an entry, else to their buckets."""
    tensors, _, whole, _, learned, _ = args
    of_item, group = place
    _, _, _, of_tokens = step
    _, q_len, offset = of_tokens
    bucket_sums, bucket = sums
    ahead, is_shared, _ = of_tile
    first_bucket = (of_item * group + received(CHANGES, NUMBER, step, 3) // MOST_HEADS) * whole[0]
    read_ds = read_later(half_ds).to(gl.float32)
    if is_shared:
        # Most tiles of an item share the previous tile's bucket.
        if first_bucket + ahead != bucket:
            add_to_bucket(bucket_sums, learned[0], bucket)
            bucket, bucket_sums = first_bucket + ahead, no_sums[0]
        bucket_sums += sums_of_two_rows(read_ds)
    else:
        add_by_distance(read_ds, learned[0], first_bucket, tensors[2], ahead, q_len, offset)
    return bucket_sums, bucket


@gluon.jit
def hopper_finish(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, sums):
    _, _, _, _, learned, _ = args
    add_to_bucket(sums[0], learned[0], sums[1])


class TableOnHopper(HopperKind):
    """A relative position table, expanded by `entries_kernel` at every call."""

    learns = is_added = reads_blocks = True

    def __init__(self, change: Any, request: HopperRequest, wanted: Sequence[bool]) -> None:
        # Rounded as for the portable kernels: they may run the other pass, which must see the same scores.
        self._dtype, self._has_gradient = request.dtype, any(wanted)
        table, buckets, until = (like(x) for x in table_of(change, self._dtype).values())
        (heads, size), codes = table.shape, len(buckets)
        entries = torch.empty(heads, codes + 2 * MARGIN.value, dtype=torch.float32, device="meta")
        self._entries, self._inside = (one_number_of(x, request.device) for x in (entries, buckets))
        programs = -(-entries.shape[1] // _BLOCK)
        numbers = {
            "inverse_unit": request.units.inverse_unit, "codes": codes, "table_size": size,
            "programs_of_head": programs,
        }  # fmt: skip
        examples = {"table_ptr": table, "buckets_ptr": buckets, "entries_ptr": entries, "inside_ptr": buckets}
        self._launch: BoundLaunch = launch_of(
            entries_kernel, {"BLOCK": _BLOCK}, numbers, examples, request.device, {}, bound=(), num_warps=4,
            num_stages=1,
        ).bind(heads * programs)  # fmt: skip
        self.launches = (self._launch,)
        self.examples = Given((entries, until))
        self.functions = {
            "record": hopper_record, "no_item": hopper_no_item, "begin_item": hopper_begin_item,
            "begin_tile": hopper_begin_tile, "apply_masked": hopper_apply_masked, "of_rows": hopper_of_rows,
        }  # fmt: skip
        if request.backward:
            self.sent = 4
            self.functions = {
                "begin": hopper_begin, "send": hopper_send, "begin_tile": hopper_receive, "apply": hopper_apply,
                "of_rows": hopper_of_keys,
            }  # fmt: skip
        if self._has_gradient:
            self.examples = Given((entries, until, buckets))
            self.whole, self.sums = (size,), (size, TABLE_SUMS.value)
            self.functions |= {
                "start": hopper_start, "gradient_later": hopper_gradient_later, "finish": hopper_finish
            }  # fmt: skip

    def tensors(self, change: Any) -> Given:
        given = table_of(change, self._dtype)
        until = given.pop("until_ptr")
        entries, inside = torch.empty_like(self._entries), torch.empty_like(self._inside)
        self._launch({**given, "entries_ptr": entries, "inside_ptr": inside})
        return Given((entries, until, inside) if self._has_gradient else (entries, until))

    def gradient(self, change: Any, call: HopperCall, written: Given) -> Tensor | None:
        return call.sums_by_head(written.tensors[0]) if self._has_gradient else None


def table_of(change: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    given = {"table_ptr": in_dtype(change.table, dtype), "buckets_ptr": change.buckets, "until_ptr": change.until}
    return {name: aligned_start(x.contiguous()) for name, x in given.items()}
