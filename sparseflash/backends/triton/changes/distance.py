"""A decay with the distance of query and key, linear (ALiBi) or logarithmic, with a slope for each head."""

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
from sparseflash.backends.triton.changes.hopper import Given, HopperKind, HopperRequest, examples_of
from sparseflash.backends.triton.changes.hopper_key_bias import hopper_finish_head, hopper_start
from sparseflash.backends.triton.changes.key_bias import start
from sparseflash.backends.triton.changes.kind import Kind, Memory, Request
from sparseflash.backends.triton.device_functions.loads import along_keys, along_queries, token_numbers
from sparseflash.backends.triton.device_functions.softmax import LN2
from sparseflash.backends.triton.hopper.configs import BLOCK
from sparseflash.backends.triton.hopper.configs import ROWS as _ROWS
from sparseflash.backends.triton.hopper.record import FIRST_Q, HEAD, field, received
from sparseflash.backends.triton.hopper.scores import (
    as_float,
    from_first_column,
    side_of_columns,
    slope_of,
    sums_of_threads,
    to_first_column,
)
from sparseflash.backends.triton.hopper.scores import distances as distances_of_tile
from sparseflash.backends.triton.launch.launches import SOME_PARTS

if TYPE_CHECKING:
    from sparseflash.backends.triton.hopper.learned import HopperCall
    from sparseflash.backends.triton.portable.learned import Call


ROWS = gl.constexpr(_ROWS)  # of a warpgroup of the Hopper forward
KEYS = gl.constexpr(BLOCK[1])  # of an item of the Hopper backward


@triton.jit
def apply(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, read, scores, at, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    slope = tl.load(args.tensors[0] + at.head).to(tl.float32)
    apart = distances(
        at.first_q, at.first_k, at.q_len, at.k_len, TILE_M, TILE_N, CHANGES.kinds[NUMBER].IS_LOG, TRANSPOSED
    )  # fmt: skip
    # An explicit fma: the compiler could fuse either of two products with the subtraction, so the forward and the
    # backward could round a steep decay differently.
    return tl.fma(-slope, apart, scores), ()


@triton.jit
def distances(
    first_q, first_k, q_len, k_len,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, IS_LOG: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The distance of query and key, or log(1 + distance). The last query is aligned with the last key.

    Positions are relative to a token of the tile while they are integers, because fp32 cannot hold all positions above
    2^24. The reference token is the first of the tile that a program holds, which is never gathered.
    """
    q, k = token_numbers(first_q, TILE_M) + (k_len - q_len), token_numbers(first_k, TILE_N)
    start = first_k if TRANSPOSED else first_q + (k_len - q_len)
    query, key = (q - start).to(tl.float32), (k - start).to(tl.float32)
    apart = tl.abs(along_queries(query, TRANSPOSED) - along_keys(key, TRANSPOSED))
    if IS_LOG:
        return tl.log2(1.0 + apart) * LN2
    else:
        return apart


@triton.jit
def gradient(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, ds, kept, at, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    TILE_M: tl.constexpr = ds.shape[0]
    TILE_N: tl.constexpr = ds.shape[1]
    apart = distances(at.first_q, at.first_k, at.q_len, at.k_len, TILE_M, TILE_N, CHANGES.kinds[NUMBER].IS_LOG, False)
    sums += -tl.sum(ds * apart, 1)
    return ds, sums


@triton.jit
def finish(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, place, first, length, TILE: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
    tl.store(args.learned[0] + place * TILE + tl.arange(0, TILE), sums)


class DistanceKind(Kind):
    """Each program of dq_kernel writes a part of the slope's gradient for each of its queries."""

    def __init__(self, change: Any, request: Request, wanted: Sequence[bool]) -> None:
        super().__init__({"apply": apply})
        self.facts["IS_LOG"] = bool(change.is_log)
        if any(wanted):
            self.rows = {"start": start, "gradient": gradient, "finish": finish}
            self.learned = Memory((SOME_PARTS,))

    def tensors(self, change: Any, device: torch.device) -> tuple[Tensor, ...]:
        return (aligned_start(change.slopes.contiguous()),)

    def memory(self, change: Any, call: Call, planned: Any) -> Memory:
        return Memory((call.empty_of_queries(),)) if self.learned.rows else Memory()

    def gradients(self, change: Any, call: Call, written: Memory) -> list[Tensor | None]:
        if not written.rows:
            return [None]
        return [call.sums_by_head(written.rows[0].sum(1, keepdim=True)).squeeze(1)]


# ---------------------------------------------------------------------- the Hopper kernels


@gluon.jit
def hopper_no_item(CHANGES: gl.constexpr, NUMBER: gl.constexpr):
    return 0.0, 0


@gluon.jit
def hopper_begin_item(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, item, C: gl.constexpr, BLOCK_N: gl.constexpr):
    tensors, numbers, _, _ = args
    record_s, turn, _, offset, _ = item
    slope = slope_of(tensors[0], field(record_s, turn, HEAD), numbers[0])
    return slope, field(record_s, turn, FIRST_Q) + (C * ROWS + offset)


@gluon.jit
def hopper_begin_tile(
    CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, of_item, block, item, C: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    slope, first_position = of_item
    ahead = first_position - block * BLOCK_N
    side = side_of_columns(ahead, slope, item[4], ROWS, BLOCK_N, CHANGES.kinds[NUMBER].IS_LOG)
    return (slope, ahead, side), side == 0


@gluon.jit
def hopper_apply(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, buffers, s, of_tile, step, C: gl.constexpr):
    slope, ahead, side = of_tile
    THREADS: gl.constexpr = sums_of_threads(s).type.layout
    return s, (slope, to_first_column(ahead, ROWS, THREADS), side)


@gluon.jit
def hopper_apply_masked(
    CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, s, of_tile, block, item, C: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    slope, first, side = of_tile
    LAYOUT: gl.constexpr = s.type.layout
    distant = gl.where(side == 0, slope, 0.0)
    return s - distances_of_tile(first, BLOCK_N, CHANGES.kinds[NUMBER].IS_LOG, LAYOUT) * distant


@gluon.jit
def hopper_of_rows(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, s, of_tile, item, BLOCK_N: gl.constexpr):
    slope, first, side = of_tile
    LAYOUT: gl.constexpr = s.type.layout
    lean = gl.where(side == 0, 0.0, side * slope)  # a slope that is not finite would undo the mask
    return s + from_first_column(BLOCK_N, LAYOUT) * lean, first * lean


@gluon.jit
def hopper_send(
    CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, begun, place, of_tokens, ROWS: gl.constexpr
):  # fmt: skip
    """`(by how many tokens the first key comes after the first query, side of the queries, bits of the slope)`. The
    slope has the sign with which it is added to scores on that side.
    """
    tensors, numbers, _, _, _, _ = args
    qk_scale, _, offset = of_tokens
    _, head, _, first_q, first_k = place
    slope = slope_of(tensors[0], head, numbers[0])
    ahead = first_k - (first_q + offset)
    side = side_of_columns(ahead, slope, qk_scale, KEYS, ROWS, CHANGES.kinds[NUMBER].IS_LOG)
    slope = gl.where(side == 0, slope, side * slope)
    return (ahead, side, gl.cast(slope, gl.int32, bitcast=True)), ()


@gluon.jit
def hopper_receive(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, step, no_scores):
    ahead, side = received(CHANGES, NUMBER, step, 0), received(CHANGES, NUMBER, step, 1)
    return as_float(received(CHANGES, NUMBER, step, 2)), ahead, side


@gluon.jit
def hopper_of_keys(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, s, of_tile, qk_scale):
    """Subtracts the decay. In a linear decay, the part of each thread of a row is returned, to be added to exponents.
    In `of_tile`, `to_first_column` replaces the offset of the tile.
    """
    slope, ahead, side = of_tile
    COLUMNS: gl.constexpr = s.shape[1]
    LAYOUT: gl.constexpr = s.type.layout
    THREADS: gl.constexpr = sums_of_threads(s).type.layout
    first = to_first_column(ahead, KEYS, THREADS)
    if side == 0:
        s -= distances_of_tile(first, COLUMNS, CHANGES.kinds[NUMBER].IS_LOG, LAYOUT) * slope
    lean = gl.where(side == 0, 0.0, slope)  # a slope that is not finite would undo the mask
    s += from_first_column(COLUMNS, LAYOUT) * lean
    return s, first * (lean * qk_scale), (slope, first, side)


@gluon.jit
def hopper_gradient(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, sums, ds, of_tile):
    _, first, side = of_tile
    COLUMNS: gl.constexpr = ds.shape[1]
    LAYOUT: gl.constexpr = ds.type.layout
    if side == 0:
        apart = distances_of_tile(first, COLUMNS, CHANGES.kinds[NUMBER].IS_LOG, LAYOUT)
        gained = 0.0 - sums_of_threads(ds * apart)
    else:
        gained = (sums_of_threads(ds * from_first_column(COLUMNS, LAYOUT)) + sums_of_threads(ds) * first) * side
    return sums + gained


class DistanceOnHopper(HopperKind):
    """Each item of the backward writes a part of the slope's gradient for each of its keys."""

    learns = is_added = at_all_dims = goes_beside = reads_blocks = True
    adds = "threads"

    def __init__(self, change: Any, request: HopperRequest, wanted: Sequence[bool]) -> None:
        self.facts = {"IS_LOG": bool(change.is_log)}
        self.numbers = (request.units.inverse_unit,)
        self.examples = examples_of(self.tensors(change))
        self.functions = {
            "no_item": hopper_no_item, "begin_item": hopper_begin_item, "begin_tile": hopper_begin_tile,
            "apply": hopper_apply, "apply_masked": hopper_apply_masked, "of_rows": hopper_of_rows,
        }  # fmt: skip
        if request.backward:
            self.sent = 3
            self.functions = {"send": hopper_send, "begin_tile": hopper_receive, "of_rows": hopper_of_keys}
        if any(wanted):
            self.sums = (KEYS.value,)
            self.functions |= {"start": hopper_start, "gradient": hopper_gradient, "finish_head": hopper_finish_head}

    def tensors(self, change: Any) -> Given:
        return Given((aligned_start(change.slopes.contiguous()),))

    def gradient(self, change: Any, call: HopperCall, written: Given) -> Tensor | None:
        return None if self.sums is None else call.sums_by_head(written.tensors[0])
