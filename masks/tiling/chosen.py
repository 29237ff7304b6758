"""Common parts of all choices at run time: the tiles that can be chosen, and the dynamic mask of the kept tiles.

The host does not wait for the device: everything that depends on lengths and blocks alone is made on the CPU once, and
the choice is stored in arrays of a size that is known beforehand.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import dense_tensor, described, has_integers, integer_tensor
from sparseflash.blockmask.build import arrays_of
from sparseflash.blockmask.cache import bounded_tensors
from sparseflash.blockmask.compiling import contents_when_faking
from sparseflash.limits import check_count
from sparseflash.masks.tiling.draws import Integers
from sparseflash.masks.tiling.listing import columns_between

# Shares are added up in units of 2^-40, because a sum of integers does not depend on the order.
SHARE_UNITS = float(1 << 40)


class RowFrame(NamedTuple):
    """The tiles that may be chosen, by block rows, on the device of the choice.

    Row i may choose column j iff `j < stop[i]`; the live scores of the tile are then
    `kinds[i, max(j - last_whole[i], 0)]`.
    """

    q_len: int
    k_len: int
    block: tuple[int, int]
    stop: Tensor  # int32 [Mq, 1]
    last_whole: Tensor  # int32 [Mq, 1]: up to this column, neither the diagonal nor the end of the keys cuts a tile
    kinds: Tensor  # int32 [Mq, n], as `BlockMask.tile`
    bits: Tensor  # int32 [T, block_q, words]
    rooms: tuple[int, ...]  # tiles of a pattern if every row keeps as many as possible of at most 0, 1, ..., Mk


class Frame(NamedTuple):
    """The same for each tile, and which tiles are always chosen."""

    q_len: int
    k_len: int
    block: tuple[int, int]
    causal: bool
    open: Tensor  # bool [Mq, Mk]: the tile may be chosen
    forced: Tensor  # bool [Mq, Mk]: the tile is always chosen
    kind: Tensor  # int32 [Mq * Mk]: the live scores of the tile if chosen, as `BlockMask.tile`
    bits: Tensor  # int32 [T, block_q, words]
    rooms: tuple[int, ...]  # as in `RowFrame`
    forced_in_row: int  # the largest number in any row


@bounded_tensors(maxsize=32)
def row_frame(q_len: int, k_len: int, block: tuple[int, int], causal: bool, device: torch.device) -> RowFrame:
    """All tiles, or the tiles of `masks.causal`, whose diagonal is aligned at the bottom right.

    Takes time and memory in proportion to the block rows and columns. To torch.compile it is a constant, because it
    cannot trace the construction.
    """
    block_q, block_k = block
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    first = np.arange(row_blocks) * block_q + (k_len - q_len)
    last = np.minimum(first + block_q, k_len) - 1
    whole, stop = np.full(row_blocks, k_len // block_k), np.full(row_blocks, col_blocks)
    if causal:
        whole, stop = np.minimum(whole, np.maximum(first + 1, 0) // block_k), np.maximum(last // block_k + 1, 0)
    rows, cols = columns_between(whole, stop - 1)
    at = cols - whole[rows] + 1
    if q_len % block_q and whole[-1] > 0:
        place = np.searchsorted(rows, row_blocks - 1)
        rows, cols, at = np.insert(rows, place, row_blocks - 1), np.insert(cols, place, 0), np.insert(at, place, 0)
    # Tiles at the same distance from the diagonal hold the same scores, until the ends cut them.
    distances, which = np.unique(first[rows] - cols * block_k if causal else rows * 0 + k_len, return_inverse=True)
    words = bitmask.below(distances[:, None] + np.arange(1, block_q + 1), block_k)
    with contents_when_faking():
        part = (torch.from_numpy(rows), torch.from_numpy(cols), torch.from_numpy(which + 1), torch.from_numpy(words))
        _, _, tile, bits, _ = arrays_of(q_len, k_len, block_q, block_k, [part])
        kinds = np.zeros((row_blocks, int((stop - whole).max(initial=0)) + 1), dtype=np.int32)
        kinds[rows, at] = tile.numpy()
        of_rows = [torch.from_numpy(x.astype(np.int32)) for x in (stop[:, None], whole[:, None] - 1, kinds)]

    # The copies need not have finished when this returns: the kernels that read them are queued after them.
    ends, last_whole, of_tiles, bits = (x.to(device, non_blocking=True) for x in (*of_rows, bits))
    rooms = 0, *_longer_than(stop, col_blocks).cumsum().tolist()
    return RowFrame(q_len, k_len, block, ends, last_whole, of_tiles, bits, rooms)


# Set by `torch.compiler.assume_constant_result`, too, but importing the compiler takes a second.
row_frame._dynamo_marked_constant = True  # type: ignore[attr-defined]


@bounded_tensors(maxsize=32)
def frame(
    q_len: int, k_len: int, block: tuple[int, int], causal: bool, sink: int, local: int, device: torch.device
) -> Frame:
    """The tiles of `row_frame`; the first `sink` columns, and tiles nearer than `local` to the diagonal, are forced.

    A block row may cross the diagonal in several tiles, which are all at distance 0.
    """
    block_q, block_k = block
    shift = k_len - q_len
    with contents_when_faking():
        of = row_frame(q_len, k_len, block, causal, torch.device("cpu"))
        i, j = (torch.arange(-(-n // b), device="cpu") for n, b in ((q_len, block_q), (k_len, block_k)))
        i = i[:, None]
        open_ = j < of.stop
        at = (j - of.last_whole).clamp_(0, of.kinds.shape[1] - 1)
        kind = of.kinds.gather(1, at).masked_fill_(~open_, 0)
        first, last = i * block_q + shift, (i * block_q + block_q).clamp(max=q_len) - 1 + shift
        own = torch.div(first, block_k, rounding_mode="floor"), torch.div(last, block_k, rounding_mode="floor")
        near = (j > own[0] - local) & (j < own[1] + (1 if causal else local))
        forced = open_ & ((j < sink) | (near & (local > 0)))
        forced_in_row = int(forced.sum(1).max())

    open_, forced, kind, bits = (x.to(device, non_blocking=True) for x in (open_, forced, kind.view(-1), of.bits))
    return Frame(q_len, k_len, block, causal, open_, forced, kind, bits, of.rooms, forced_in_row)


frame._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _longer_than(counts: Integers, stop: int) -> Integers:
    """The number of counts above 0, 1, ..., stop - 1."""
    found: Integers = len(counts) - np.bincount(counts, minlength=stop + 1).cumsum()[:stop]
    return found


class Kept(NamedTuple):
    """The kept tiles of all patterns in CSR form, with room for the largest possible number."""

    indptr: Tensor  # int32 [P * Mq + 1]
    indices: Tensor  # int32 [room]
    place: Tensor  # int64 [room], index of the tile in [P, Mq, Mk]; in unused room, of the last tile
    running: Tensor  # int64 [P * Mq * Mk], the number of kept tiles up to and including each


def compact(kept: Tensor, room: int) -> Kept:
    """The kept tiles, from bool `kept [B, H, Mq, Mk]` with at most `room` True entries."""
    cols = kept.shape[-1]
    check_count("the room for tiles of a mask", room, remedy="Use larger blocks, or choose fewer of them.")
    running = kept.reshape(-1).cumsum(0)
    indptr = torch.nn.functional.pad(running.view(-1, cols)[:, -1], (1, 0)).to(torch.int32)
    # Looked up instead of written, so that the unused room is the same in every run, too.
    wanted = torch.arange(1, room + 1, device=kept.device)
    place = torch.searchsorted(running, wanted).clamp_(max=len(running) - 1)
    return Kept(indptr, (place % cols).to(torch.int32), place, running)


def dynamic_mask(
    frame: Frame | RowFrame, indptr: Tensor, indices: Tensor, tile: Tensor, bits: Tensor, heads: tuple[int, int],
    group: int,
) -> BlockMask:  # fmt: skip
    """The mask of kept tiles, with `heads = (B, H)`: `group` query heads use pattern b * H + h."""
    pattern = pattern_of(*heads, group, tile.device)
    if not torch.compiler.is_compiling():
        return BlockMask._chosen((frame.q_len, frame.k_len, *frame.block), indptr, indices, tile, bits, pattern)
    return BlockMask(
        frame.q_len, frame.k_len, *frame.block, indptr, indices, tile, bits.detach(), pattern.detach(), dynamic=True
    )


@bounded_tensors(maxsize=32)
def pattern_of(batch: int, heads: int, group: int, device: torch.device) -> Tensor:
    """`BlockMask.pattern` if `group` query heads share each of `heads` choices."""
    pattern = torch.arange(batch * heads, dtype=torch.int32, device="cpu").view(batch, heads, 1)
    return pattern.expand(-1, -1, group).reshape(batch, heads * group).contiguous().to(device, non_blocking=True)


pattern_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def mask_of_blocks(frame: Frame, kept: Tensor, most: int, group: int) -> BlockMask:
    """The mask of the tiles `kept`, bool `[B, H, Mq, Mk]`, at most `most` in a row, with the live scores
    of the frame.
    """
    batch, heads = kept.shape[:2]
    found = compact(kept, batch * heads * frame.rooms[most])
    return dynamic_mask(frame, found.indptr, found.indices, kind_of(frame, found), frame.bits, (batch, heads), group)


def kind_of(frame: Frame, kept: Kept) -> Tensor:
    """The live scores of each kept tile: int32 [room], as `Frame.kind`."""
    kinds, tiles_of_all = frame.kind, len(kept.running)
    return kinds[kept.place if len(kinds) == tiles_of_all else kept.place % len(kinds)]


def as_heads(name: str, values: Tensor, axes: str, *, floating: bool) -> Tensor:
    """The values to choose by, as `[B, H, *axes]` and without a gradient."""
    dense_tensor(values, name)
    if not (values.is_floating_point() if floating else has_integers(values)):
        raise TypeError(f"{name} must have {'a floating' if floating else 'an integer'} dtype; got {values.dtype}.")
    if values.ndim not in (2, 3, 4) or 0 in values.shape:
        raise ValueError(
            f"{name} must have shape [{axes}], [H, {axes}] or [B, H, {axes}], none of them 0; got {list(values.shape)}."
        )
    return values.detach().reshape((1,) * (4 - values.ndim) + values.shape)


def check_queries_and_keys(q: Tensor, k: Tensor, lengths: Tensor | Sequence[int] | None) -> Tensor | None:
    """Checks the arguments of functions that compute block scores; returns the lengths as int64 `[B]`."""
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a floating tensor [batch, heads, tokens, head dim]; got {got}.")
    batch, heads, _, dim = q.shape
    if k.shape[0] != batch or k.shape[3] != dim or 0 in q.shape or 0 in k.shape or heads % k.shape[1]:
        raise ValueError(
            "q and k must have one batch size, one head dim and query heads a multiple of the key heads, and no "
            f"dimension of 0; got {list(q.shape)} and {list(k.shape)}."
        )
    if lengths is None:
        return None
    # In int64, because a narrow type may be too small for the number of tokens.
    lengths = integer_tensor(lengths, "lengths", q.device)
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must have shape [{batch}]; got {list(lengths.shape)}.")
    return lengths


def checked_factor(scale: Any, dim: int) -> float:
    """The factor of the scores that blocks are chosen by, `1 / sqrt(dim)` by default."""
    if scale is None:
        return 1.0 / math.sqrt(dim)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale must be a number; got {described(scale)}.")
    if not abs(scale) <= sys.float_info.max:
        raise ValueError(f"scale must be finite; got {scale}.")
    return float(scale)


def full_words(frame: Frame) -> Tensor:
    """The bits of every kind, the full one (0) included: int32 `[1 + T, block_q, words]`."""
    full = frame.bits.new_full((1, *frame.bits.shape[1:]), bitmask.full_word(frame.block[1]))
    return torch.cat([full, frame.bits])
