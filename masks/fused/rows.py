"""Blocks chosen by their scores, in two launches with one program for each row: the first chooses, the second lists."""

from __future__ import annotations

import struct
import sys

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.launcher import launches_of
from sparseflash.masks.fused.starts import MOST_SUMMED, start_of
from sparseflash.masks.fused.unused import clear_unused
from sparseflash.masks.tiling.chosen import SHARE_UNITS, Frame

_PAIRS_AT_ONCE = 8192
_SHARE_UNITS = tl.constexpr(SHARE_UNITS)


def tiles_of_rows(scores: Tensor, of: Frame, most: int, mass: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """The arrays `(indptr, indices, tile)` of the mask that `chosen_blocks` makes of scores `[B, H, Mq, Mk]`.

    mass: None for the `most` best of each row, otherwise the share that the kept blocks must hold.
    """
    if mass == 1.0:
        mass = None  # then up to `most` blocks are kept, including those of weight 0
    scores = scores.contiguous()
    device, (rows, cols) = scores.device, of.open.shape
    lists = scores.numel() // cols
    room = lists // rows * of.rooms[most]
    kept = torch.empty(scores.shape, dtype=torch.uint8, device=device)
    counts = torch.empty(lists + 1, dtype=torch.int32, device=device)
    indices = torch.empty(room, dtype=torch.int32, device=device)
    tile, is_made = torch.empty_like(indices), lists > MOST_SUMMED
    key = device, cols, scores.dtype, mass is None, scores.data_ptr() % 16, is_made
    padded = max(16, 1 << (cols - 1).bit_length())
    _choosing(*key).start(
        lists, scores, of.open, of.forced, kept, counts, rows, cols, most, _bits_of(mass),
        padded, min(padded, max(8, _PAIRS_AT_ONCE // padded)), torch.finfo(scores.dtype).max, mass is not None,
    )  # fmt: skip
    indptr = counts.cumsum(0, dtype=torch.int32) if is_made else torch.empty_like(counts)
    _listing(*key).start(
        lists, kept, of.kind, counts, indptr, indices, tile, rows, cols, room, -(-room // lists), padded, is_made
    )  # fmt: skip
    return indptr, indices, tile


def _bits_of(mass: float | None) -> int:
    """The bits of an fp64 number, as an int64: Triton would pass the number itself in fp32.

    Subnormal shares are raised to the smallest normal number, because Triton would pass an int64 that fits into 32 bits
    as an int32. Both are far below the unit in which shares are added.
    """
    return int(struct.unpack("<q", struct.pack("<d", max(mass or 0.0, sys.float_info.min)))[0])


@triton.jit
def _read(scores_ptr, open_ptr, forced_ptr, col, cols, LARGEST: tl.constexpr):
    """For some blocks of a row: the value they are ranked by, the score or -inf, whether forced, whether they may be
    kept. Scores are made finite, so that forced blocks rank highest and the softmax has no inf - inf.
    """
    inside = col < cols
    score = tl.load(scores_ptr + col, mask=inside, other=float("-inf")).to(tl.float32)
    forced = tl.load(forced_ptr + col, mask=inside, other=0).to(tl.int1)
    scored = tl.load(open_ptr + col, mask=inside, other=0).to(tl.int1) & (score > float("-inf"))  # False for NaN
    clean = tl.where(scored, tl.where(score > LARGEST, LARGEST, score), float("-inf"))
    return tl.where(forced, float("inf"), clean), clean, forced, scored | forced


@triton.jit(do_not_specialize=["rows", "cols", "most", "mass_bits"])
def choose_kernel(
    scores_ptr, open_ptr, forced_ptr,  # [P, rows, cols], bool [rows, cols] twice
    kept_ptr, counts_ptr,  # uint8 as the scores; int32 [1 + P * rows], the first one 0
    rows, cols, most, mass_bits,
    COLS: tl.constexpr, CHUNK: tl.constexpr, LARGEST: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Chooses the blocks of one row. Of equal blocks the first comes first; shares are integers, so they add up in any
    order.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program % rows
    scores_ptr += program * cols
    open_ptr += row * cols
    forced_ptr += row * cols
    col = tl.arange(0, COLS)
    key, clean, forced, usable = _read(scores_ptr, open_ptr, forced_ptr, col, cols, LARGEST)
    top = tl.max(clean, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.sum(tl.exp(clean - top), 0)
    weights = tl.where(weights == 0.0, 1.0, weights)  # where no block of the row may be chosen by its score

    rank = tl.zeros([COLS], tl.int32)
    before = tl.zeros([COLS], tl.int64)
    total = tl.zeros([], tl.int64)
    for start in range(0, cols, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_key, other_clean, _, _ = _read(scores_ptr, open_ptr, forced_ptr, other, cols, LARGEST)
        earlier = (other[None, :] < col[:, None]) & (other_key[None, :] == key[:, None])
        ahead = ((other_key[None, :] > key[:, None]) | earlier) & (other[None, :] < cols)
        rank += tl.sum(ahead.to(tl.int32), 1)
        if MASS:
            units = (tl.exp(other_clean - top) / weights * _SHARE_UNITS).to(tl.int64)
            before += tl.sum(tl.where(ahead, units[None, :], 0), 1)
            total += tl.sum(units, 0)
    kept = usable & (rank < most)
    if MASS:
        mass = mass_bits.to(tl.float64, bitcast=True)
        wanted = before.to(tl.float64) < total.to(tl.float64) * mass
        kept = usable & ((wanted & (rank < most)) | forced)
    tl.store(kept_ptr + program * cols + col, kept.to(tl.uint8), mask=col < cols)
    tl.store(counts_ptr + 1 + program, tl.sum(kept.to(tl.int32), 0))
    if program == 0:
        tl.store(counts_ptr, 0)


@triton.jit(do_not_specialize=["rows", "cols", "room", "share"])
def list_kernel(
    kept_ptr, kind_ptr, counts_ptr, indptr_ptr,  # uint8 [P, rows, cols], int32 [rows, cols], [P * rows + 1] twice
    indices_ptr, tile_ptr,  # int32 [room]
    rows, cols, room, share,  # the part of the room that a program fills
    COLS: tl.constexpr, IS_MADE: tl.constexpr,
):  # fmt: skip
    """Writes the tiles of one row, and zeros into a part of the unused room."""
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, COLS)
    kept = tl.load(kept_ptr + program * cols + col, mask=col < cols, other=0).to(tl.int32)
    start, used = start_of(counts_ptr, indptr_ptr, IS_MADE)
    place = start + tl.cumsum(kept, 0) - 1
    kind = tl.load(kind_ptr + program % rows * cols + col, mask=kept > 0, other=0)
    tl.store(indices_ptr + place, col, mask=kept > 0)
    tl.store(tile_ptr + place, kind, mask=kept > 0)
    clear_unused(indices_ptr, tile_ptr, used, share, room, COLS)


_choosing = launches_of(choose_kernel, num_warps=4, num_stages=1, most=128)
_listing = launches_of(list_kernel, num_warps=4, num_stages=1, most=128)
