"""A pair bias stored only for the live tiles of the mask. The kernels must run in the mask's own tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.changes.kind import Kind, Memory, Request
from sparseflash.backends.triton.changes.pair_bias import apply, dtype_of_parts
from sparseflash.backends.triton.device_functions.loads import along_keys, along_queries, token_numbers
from sparseflash.backends.triton.schedule.tile_places import TilePlaces
from sparseflash.scores.tile_bias import StoredTiles

if TYPE_CHECKING:
    from sparseflash.backends.triton.portable.learned import Call
    from sparseflash.backends.triton.schedule.plan import Plan


@triton.jit
def load(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, at,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """A tile of the bias, with 0 for queries past the sequence's length. Whole tiles are stored, so no read is out of
    bounds.
    """
    CUT: tl.constexpr = at.q_length is not None
    tile = number_of_tile(args, at.batch, at.head, at.first_q // BLOCK_Q, at.first_k // BLOCK_K)
    tile += tl.cast(at.batch, tl.int64) * args.whole[0] + tl.cast(at.head, tl.int64) * args.whole[1]
    places = places_in_tile(at.first_q, at.first_k, BLOCK_Q, BLOCK_K, TILE_M, TILE_N, TRANSPOSED)
    values = args.tensors[0] + tile * (BLOCK_Q * BLOCK_K) + places
    if CUT:
        q = token_numbers(at.first_q, TILE_M)
        return tl.load(values, mask=along_queries(q < at.q_length, TRANSPOSED), other=0.0)
    else:
        return tl.load(values)


@triton.jit
def gradient(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, ds, kept, at, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of the tile, with 0 for dead scores."""
    TILE_M: tl.constexpr = ds.shape[0]
    TILE_N: tl.constexpr = ds.shape[1]
    dtiles_ptr, starts_ptr = args.learned
    tile = number_of_tile(args, at.batch, at.head, at.first_q // BLOCK_Q, at.first_k // BLOCK_K)
    tile += tl.load(starts_ptr + at.batch_head)
    places = places_in_tile(at.first_q, at.first_k, BLOCK_Q, BLOCK_K, TILE_M, TILE_N, False)
    tl.store(dtiles_ptr + tile * (BLOCK_Q * BLOCK_K) + places, ds.to(dtiles_ptr.dtype.element_ty))
    return ds, sums


@triton.jit
def number_of_tile(args, batch, head, row, column):
    """The index of a live tile in the mask's list, int64, from its block row and column; see blockmask/numbering.py."""
    _, tile_numbers_ptr, pattern_ptr = args.tensors
    _, _, patterns_of_batch, patterns_of_head, tile_rows, tile_words = args.whole
    pattern = tl.load(pattern_ptr + batch * patterns_of_batch + head * patterns_of_head)
    block_row = tl.cast(pattern * tile_rows + row, tl.int64)
    word_ptr = tile_numbers_ptr + 2 * (block_row * tile_words + column // 32)
    x = tl.load(word_ptr) & ~(-1 << column % 32)  # bits of the live tiles before this one; below a population count
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return tl.cast(tl.load(word_ptr + 1) + ((x + (x >> 16)) & 63), tl.int64)


@triton.jit
def places_in_tile(
    first_q, first_k,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Offsets of the scores of a step in their stored tile of BLOCK_Q x BLOCK_K, in row-major order."""
    rows, columns = first_q % BLOCK_Q + tl.arange(0, TILE_M), first_k % BLOCK_K + tl.arange(0, TILE_N)
    return along_queries(rows * BLOCK_K, TRANSPOSED) + along_keys(columns, TRANSPOSED)


class TileBiasKind(Kind):
    """A tile bias. dq_kernel writes its gradients, to several copies if heads share the stored tiles."""

    def __init__(self, change: StoredTiles, request: Request, wanted: Sequence[bool]) -> None:
        super().__init__({"load": load, "apply": apply})
        self._shape = change.values.shape
        self.whole = numbers_of_tiles(change)
        if any(wanted):
            self.rows = {"gradient": gradient}
            dtype = dtype_of_parts(change.values, (request.batch, request.heads, *self._shape[2:]))
            self.learned = Memory(tuple(torch.empty(16, dtype=each, device="meta") for each in (dtype, torch.int64)))

    def tensors(self, change: Any, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(aligned_start(x.contiguous()) for x in change.tensors())

    def planned(self, plan: Plan) -> TilePlaces | None:
        return TilePlaces.of(plan.pattern, self._shape) if self.learned.rows else None

    def memory(self, change: Any, call: Call, planned: TilePlaces | None) -> Memory:
        """Memory for the gradients of all copies, and int64 `[B * Hq]`, the first tile that each batch element and head
        writes to.
        """
        if planned is None:
            return Memory()
        planned.ready.wait()
        shape = planned.copies, *self._shape
        copies = torch.zeros(shape, dtype=self.learned.rows[0].dtype, device=call.device)
        return Memory((copies, planned.starts))

    def gradients(self, change: Any, call: Call, written: Memory) -> list[Tensor | None]:
        return [summed_copies(written.rows[0]) if written.rows else None, None, None]


def summed_copies(copies: Tensor) -> Tensor:
    """The sum of the gradients over the copies."""
    return copies[0] if len(copies) == 1 else copies.sum(0)


def numbers_of_tiles(tiles: StoredTiles) -> tuple[int, ...]:
    """The integers for `number_of_tile` and `load`: strides of batch and head of the values, in tiles, and of the
    patterns; the number of block rows; the words per block row in `tile_numbers`. Shared dimensions have stride 0."""
    (batch, heads, count), (pattern_batch, pattern_heads) = tiles.values.shape[:3], tiles.pattern.shape
    rows, words = tiles.tile_numbers.shape[1:3]
    return (
        heads * count if batch > 1 else 0, count if heads > 1 else 0, pattern_heads if pattern_batch > 1 else 0,
        int(pattern_heads > 1), rows, words,
    )  # fmt: skip
