"""Biases of (query, key) pairs in the Hopper kernels, and their gradients. The kernels read them without a copy.

`PairsOnHopper` has a number for every pair, `StoredPairsOnHopper` only for the pairs in live tiles of the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseflash.backends.triton.alignment import aligned_start, with_padded_rows
from sparseflash.backends.triton.changes.hopper import Given, HopperKind, HopperRequest, examples_of
from sparseflash.backends.triton.changes.tile_bias import numbers_of_tiles
from sparseflash.backends.triton.hopper.configs import BLOCK
from sparseflash.backends.triton.hopper.configs import ROWS as _ROWS
from sparseflash.backends.triton.hopper.descriptors import described_as
from sparseflash.backends.triton.hopper.gluon_api import async_load, async_store
from sparseflash.backends.triton.hopper.record import received
from sparseflash.backends.triton.hopper.scores import pair_buffers, place_of_pairs
from sparseflash.backends.triton.launch.launches import launch_of
from sparseflash.backends.triton.launcher import BoundLaunch
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.worklists import TileLists
from sparseflash.blockmask.streams import ReadyEvent

if TYPE_CHECKING:
    from sparseflash.backends.triton.hopper.learned import HopperCall

TILE_ROWS, KEYS = gl.constexpr(BLOCK[0]), gl.constexpr(BLOCK[1])
ROWS = gl.constexpr(_ROWS)  # of a warpgroup of the forward
THREADS = gl.constexpr(256)  # of the backward's warpgroups


@triton.jit(do_not_specialize=["q_len", "k_len", "width"])
def clear_kernel(
    dpairs_ptr,  # [B, Hq, Nq, width] contiguous, written where a tile is dead
    start_ptr, full_ptr, count_ptr, index_ptr,  # `TileLists` over rows
    pattern_ptr,  # int32 [B, Hq] contiguous
    q_len, k_len, width,  # width: the stride of rows, a multiple of 8
):  # fmt: skip
    row_tiles = tl.cdiv(q_len, TILE_ROWS)
    batch_head, row = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
    line = tl.load(pattern_ptr + batch_head) * row_tiles + row
    start = tl.load(start_ptr + line)
    partial = start + tl.load(full_ptr + line)
    stop = start + tl.load(count_ptr + line)
    # Tiles increase in both parts of a list: the full ones, and the others.
    next_full, next_partial = start, partial
    q = row * TILE_ROWS + tl.arange(0, TILE_ROWS)
    key = tl.arange(0, KEYS)
    rows = tl.multiple_of((tl.cast(batch_head, tl.int64) * q_len + q) * (width // 8) * 8, 8)
    targets = dpairs_ptr + (rows[:, None] + key[None, :])
    for column in range(tl.cdiv(k_len, KEYS)):
        is_full = tl.load(index_ptr + next_full, mask=next_full < partial, other=-1) == column
        is_partial = tl.load(index_ptr + next_partial, mask=next_partial < stop, other=-1) == column
        next_full += is_full.to(tl.int32)
        next_partial += is_partial.to(tl.int32)
        if not (is_full | is_partial):
            # In vectors of eight: the padding between the end of a row and its width may hold anything.
            inside = (q < q_len)[:, None] & (key // 8 * 8 + column * KEYS < k_len)[None, :]
            zeros = tl.zeros([TILE_ROWS, KEYS], dpairs_ptr.dtype.element_ty)
            tl.store(targets + column * KEYS, zeros, mask=inside)


# ---------------------------------------------------------------------- the forward


@gluon.jit
def hopper_buffers(
    CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    _, _, _, desc = args
    return pair_buffers(desc, GROUPS, ROWS, BLOCK_N, 128)


@gluon.jit
def hopper_load(
    CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, buffers, step, is_item, batch, head, first_q, first_k,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    _, _, strides, desc = args
    load_boxes(desc, buffers, (batch * strides[0], head * strides[1], first_q, first_k), step, is_item, GROUPS)


@gluon.jit
def hopper_load_stored(
    CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, buffers, step, is_item, batch, head, first_q, first_k,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    tensors, _, whole, desc = args
    at = place_of_pairs(tensors, whole, batch, head, first_q, first_k, GROUPS * ROWS, BLOCK_N)
    load_boxes(desc, buffers, at, step, is_item, GROUPS)


@gluon.jit
def load_boxes(desc, buffers, at, step, is_item, GROUPS: gl.constexpr):
    """Starts the load of one box of the bias for each warpgroup. The first box begins at `at`."""
    pair_s, full, empty = buffers
    for c in gl.static_range(GROUPS):
        mbarrier.wait(empty.index(c), (step & 1) ^ 1)
        if is_item:
            mbarrier.expect(full.index(c), desc.block_type.nbytes)
            async_load(desc, [at[0], at[1], at[2] + c * ROWS, at[3]], full.index(c), pair_s.index(c))
        else:
            mbarrier.arrive(full.index(c), count=1)


@gluon.jit
def hopper_apply(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, buffers, s, of_tile, step, C: gl.constexpr):
    _, numbers, _, _ = args
    pair_s, full, empty = buffers
    mbarrier.wait(full.index(C), step & 1)
    pairs = pair_s.index(C).load(s.type.layout)
    # Arrives without a wait for the loads: loads are in order, and the next numbers arrive long after them.
    async_copy.mbarrier_arrive(empty.index(C), increment_count=False)
    return s * numbers[0] + pairs.to(gl.float32), of_tile


# ---------------------------------------------------------------------- the backward


@gluon.jit
def hopper_buffers_of_step(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, ROWS: gl.constexpr, KEYS: gl.constexpr):
    _, _, _, desc, _, _ = args
    return pair_buffers(desc, 1, ROWS, KEYS, THREADS)


@gluon.jit
def hopper_send(
    CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, begun, place, of_tokens, ROWS: gl.constexpr
):  # fmt: skip
    """`((first query, head), where the tile begins in the bias)`; the gradient is stored at the first two."""
    _, _, strides, _, _, _ = args
    batch, head, _, first_q, first_k = place
    head = head * strides[1]
    return (first_q, head), (batch * strides[0], head, first_q, first_k)


@gluon.jit
def hopper_send_stored(
    CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, begun, place, of_tokens, ROWS: gl.constexpr
):  # fmt: skip
    """`((first row of the stored tile,), where the tile begins in the bias)`; the gradient is stored at that row."""
    tensors, _, whole, _, _, _ = args
    batch, head, _, first_q, first_k = place
    at = place_of_pairs(tensors, whole, batch, head, first_q, first_k, TILE_ROWS, KEYS)
    return (at[2],), at


@gluon.jit
def hopper_load_step(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, buffers, step, at):
    _, _, _, desc, _, _ = args
    load_boxes(desc, buffers, at, step, True, 1)


@gluon.jit
def hopper_apply_step(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, buffers, s, of_tile, step):
    _, numbers, _, _, _, _ = args
    _, _, number, _ = step
    pair_s, full, empty = buffers
    mbarrier.wait(full.index(0), number & 1)
    pairs = pair_s.index(0).permute((1, 0)).load(s.type.layout)
    async_copy.mbarrier_arrive(empty.index(0), increment_count=False)
    return s + pairs.to(gl.float32) * numbers[0]


@gluon.jit
def hopper_store(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, ds_s, step, batch, first_k):
    _, _, _, _, _, desc = args
    first_q, head = received(CHANGES, NUMBER, step, 0), received(CHANGES, NUMBER, step, 1)
    async_store(desc, [batch, head, first_q, first_k], ds_s)


@gluon.jit
def hopper_store_stored(CHANGES: gl.constexpr, NUMBER: gl.constexpr, args, ds_s, step, batch, first_k):
    _, _, _, _, _, desc = args
    async_store(desc, [0, 0, received(CHANGES, NUMBER, step, 0), 0], ds_s)


# ---------------------------------------------------------------------- the host


@dataclass(frozen=True)
class _LiveTiles:
    lists: TileLists  # over rows
    pattern: Tensor  # int32 [B, Hq] contiguous
    ready: ReadyEvent = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ready", ReadyEvent((self.lists, self.pattern)))

    @classmethod
    def of(cls, plan: Plan) -> _LiveTiles:
        lists = plan.lists.get(0, Tiling(*BLOCK))
        lists.ready.wait()
        return cls(lists.to(plan.device), plan.pattern.contiguous())


class PairsOnHopper(HopperKind):
    """A pair bias. Its gradient is computed if no batch elements or heads share it: the backward writes the gradients
    of live tiles, and `clear_kernel` zeroes the dead tiles, which are half of a causal mask.
    """

    learns = is_added = keeps_branch = may_be_nan = True
    maxima = "unscaled"

    def __init__(self, change: Any, request: HopperRequest, wanted: Sequence[bool]) -> None:
        self._box, self._device = (request.rows, request.keys), request.device
        self.whole = self._whole(change)
        self.numbers = (request.units.inverse_unit if request.backward else request.units.cap_scale,)
        self.examples = examples_of(self.tensors(change))
        self.describe = described_as(self._values(self.examples), *self._box)
        self.functions = {"buffers": hopper_buffers, "load_last": self._loads, "apply": hopper_apply}
        if request.backward:
            self.functions = {
                "buffers": hopper_buffers_of_step, "send": self._sends, "load_last": hopper_load_step,
                "apply": hopper_apply_step,
            }  # fmt: skip
            self.sent = self._sent
        if any(wanted):
            self.functions |= {"store": self._stores}
            self._learn()

    _loads, _sends, _sent, _stores = hopper_load, hopper_send, 2, hopper_store

    def _whole(self, change: Any) -> tuple[int, ...]:
        batch, heads = change.values.shape[:2]
        return int(batch > 1), int(heads > 1)

    def tensors(self, change: Any) -> Given:
        return Given((), change.values)

    def _values(self, given: Given) -> Tensor:
        if given.described is None:
            raise RuntimeError("a bias of pairs is read by a descriptor")
        return given.described

    def _learn(self) -> None:
        values = self._values(self.examples)
        padded = with_padded_rows(values)
        self._q_len, k_len = values.shape[2:]
        example = padded[..., :k_len]
        self.learned_examples, self.describe_learned = Given((), example), described_as(example, *self._box)
        numbers = {"q_len": self._q_len, "k_len": k_len, "width": padded.shape[3]}
        self._clear = launch_of(
            clear_kernel, {}, numbers, {"dpairs_ptr": padded}, self._device, {},
            bound=("start_ptr", "full_ptr", "count_ptr", "index_ptr", "pattern_ptr"), num_warps=4, num_stages=1,
        )  # fmt: skip

    def bind(self, plan: Plan, block: tuple[int, int]) -> tuple[BoundLaunch, ReadyEvent] | None:
        """The launch that zeroes dead tiles, and the event after which it may read the lists; None if none is dead."""
        if self.describe_learned is None or plan.has_every_tile(block):
            return None
        live = plan.derived("live tiles of hopper's pairs", lambda: _LiveTiles.of(plan))
        clear = self._clear.bind(
            plan.pattern.numel() * -(-self._q_len // BLOCK[0]), start_ptr=live.lists.start, full_ptr=live.lists.full,
            count_ptr=live.lists.count, index_ptr=live.lists.index, pattern_ptr=live.pattern,
        )  # fmt: skip
        return clear, live.ready

    def launches_of(self, bound: Any) -> list[BoundLaunch]:
        return [] if bound is None else [bound[0]]

    def memory(self, change: Any, call: HopperCall, bound: Any) -> Given:
        if self.describe_learned is None:
            return Given()
        padded = with_padded_rows(change.values)
        if call.has_lengths:
            padded.zero_()
        elif bound is not None:
            clear, ready = bound
            ready.wait()
            clear({"dpairs_ptr": padded})
        return Given((), padded[..., : change.values.shape[3]])

    def gradient(self, change: Any, call: HopperCall, written: Given) -> Tensor | None:
        return written.described


class StoredPairsOnHopper(PairsOnHopper):
    """A tile bias. For each batch element and head, the backward writes the gradients of all tiles of its pattern."""

    _loads, _sends, _sent, _stores = hopper_load_stored, hopper_send_stored, 1, hopper_store_stored

    def _whole(self, change: Any) -> tuple[int, ...]:
        return numbers_of_tiles(change)

    def tensors(self, change: Any) -> Given:
        values, numbers, pattern = (aligned_start(x.contiguous()) for x in change.tensors())
        return Given((numbers, pattern), _below_one_another(values))

    def _learn(self) -> None:
        example = torch.empty_like(self._values(self.examples))
        self.learned_examples, self.describe_learned = Given((), example), described_as(example, *self._box)

    def bind(self, plan: Plan, block: tuple[int, int]) -> None:
        return None

    def memory(self, change: Any, call: HopperCall, bound: Any) -> Given:
        """If there are several patterns, it is zeroed, because a head leaves the tiles of other patterns unwritten;
        and with lengths.
        """
        if self.describe_learned is None:
            return Given()
        found = torch.empty_like(change.values, memory_format=torch.contiguous_format)
        if len(change.tile_numbers) > 1 or call.has_lengths:
            found.zero_()
        return Given((), _below_one_another(found))

    def gradient(self, change: Any, call: HopperCall, written: Given) -> Tensor | None:
        if written.described is None:
            return None
        return written.described.reshape(-1)[: change.values.numel()].view(change.values.shape)


def _below_one_another(values: Tensor) -> Tensor:
    """Tiles `[B, H, tiles, block_q, block_k]`, viewed as one head. Without tiles, one tile that is never read, because
    a descriptor needs a tensor that is not empty.
    """
    if values.numel() == 0:
        return values.new_empty(1, 1, *values.shape[3:])
    return values.view(1, 1, -1, values.shape[4])
