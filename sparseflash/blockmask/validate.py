"""The checks of a mask's invariants.

If blocks are chosen on the GPU, only the device knows how many tiles are kept and which are equal, and asking it stalls
the queue. So a dynamic mask (`BlockMask.dynamic`) has arrays of a size that is fixed in advance: safe to run but not
canonical. It obeys the rules in `BlockMask` that the kernels need:

- `indptr` starts at 0 and does not decrease. Its last number may be less than the length of `indices` and `tile`; the
  entries past it are unused capacity and belong to no row.
- `indices` strictly increase within a row and lie in `0 .. Mk - 1`, `tile` lies in `0 .. T` and `pattern` in
  `0 .. P - 1`. The ranges hold for the unused capacity, too.
- Scores past the ends are dead, so a tile that an end cuts is partial.

It need not obey the other rules: `bits` may hold equal, dead, full and unused tiles in any order, and patterns may be
equal or unused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.arguments import block_pair, token_counts
from sparseflash.blockmask.csr import row_of_entry
from sparseflash.blockmask.patterns import distinct_patterns, patterns_of
from sparseflash.blockmask.stats import pattern_count
from sparseflash.blockmask.unique import number_by_first_appearance
from sparseflash.limits import check_count

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask


def check_arrays(mask: BlockMask) -> None:
    """The O(1) checks: types, shapes, devices."""
    for name in ("q_len", "k_len", "block_q", "block_k"):
        if isinstance(size := getattr(mask, name), Tensor | np.ndarray):
            raise TypeError(f"{name} must be an int, not in a tensor or array; got {size!r}.")
    token_counts(mask.q_len, mask.k_len)
    block_pair((mask.block_q, mask.block_k))
    row_blocks = mask.blocks[0]
    for name in ("indices", "indptr", "tile", "bits", "pattern", "lengths"):
        array = getattr(mask, name)
        if array is None and name == "lengths":
            continue
        if not isinstance(array, Tensor) or array.dtype != torch.int32:
            got = array.dtype if isinstance(array, Tensor) else type(array).__name__
            raise TypeError(f"{name} must be an int32 tensor; got {got}.")
        if array.device != mask.indices.device:
            raise ValueError(
                f"all arrays must be on one device; {name} is on {array.device}, indices are on {mask.device}."
            )
        # `lengths` may be one row expanded to queries and keys.
        if not (array[:1] if name == "lengths" and array.ndim == 2 else array).is_contiguous():
            raise ValueError(f"{name} must be contiguous; call .contiguous() on it.")
    for what, array in (("tiles", mask.indices), ("block rows", mask.indptr), ("distinct partial tiles", mask.bits)):
        check_count(f"{what} of a mask", *array.shape[:1], remedy="Use larger blocks, or fewer patterns.")
    if mask.indptr.ndim != 1 or len(mask.indptr) < row_blocks + 1 or (len(mask.indptr) - 1) % row_blocks:
        raise ValueError(
            f"indptr must have P * {row_blocks} + 1 entries ({row_blocks} block rows per pattern); "
            f"got shape {list(mask.indptr.shape)}."
        )
    if mask.indices.ndim != 1 or mask.tile.shape != mask.indices.shape:
        raise ValueError(
            f"indices and tile must have one shape [nnz]; got {list(mask.indices.shape)} and {list(mask.tile.shape)}."
        )
    want = (mask.block_q, bitmask.words_per_row(mask.block_k))
    if mask.bits.ndim != 3 or tuple(mask.bits.shape[1:]) != want:
        raise ValueError(f"bits must have shape [T, {want[0]}, {want[1]}]; got {list(mask.bits.shape)}.")
    if mask.pattern.ndim != 2 or mask.pattern.numel() == 0:
        raise ValueError(f"pattern must have shape [B or 1, Hq or 1]; got {list(mask.pattern.shape)}.")
    if mask.lengths is not None:
        shape = mask.lengths.shape
        if len(shape) != 2 or shape[0] != 2 or mask.pattern.shape[0] not in (1, shape[1]):
            raise ValueError(f"lengths must have shape [2, B] with the pattern's B; got {list(shape)}.")


def validate(mask: BlockMask) -> None:
    """The O(nnz) checks; see `BlockMask.validate`."""
    if mask.device.type == "meta":
        raise ValueError("mask must lie on a device that holds its contents; got the meta device, which has none.")
    (row_blocks, col_blocks), nnz = mask.blocks, len(mask.indices)
    dynamic = mask.dynamic  # checks only what makes a mask safe to run
    indptr, indices, tile = mask.indptr.cpu().long(), mask.indices.cpu().long(), mask.tile.cpu().long()
    patterns = pattern_count(mask)
    bits = mask.bits.cpu()

    def must(holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"not a valid BlockMask: {rule}.")

    stored = int(indptr[-1])
    ends = int(indptr[0]) == 0 and (stored <= nnz if dynamic else stored == nnz)
    must(ends, f"indptr must run from 0 to {'at most ' if dynamic else ''}the {nnz} stored tiles")
    must(bool((indptr.diff() >= 0).all()), "indptr must not decrease")
    must(bool(((indices >= 0) & (indices < col_blocks)).all()), f"indices must lie in 0..{col_blocks - 1}")
    must(bool(((tile >= 0) & (tile <= len(bits))).all()), f"tile must lie in 0..{len(bits)}")
    rows, indices, tile = row_of_entry(indptr, stored), indices[:stored], tile[:stored]
    must(bool(((rows * col_blocks + indices).diff() > 0).all()), "indices must strictly increase in a row")
    used = number_by_first_appearance(tile[tile > 0])
    first = tile[tile > 0][used[1]]
    numbered = dynamic or torch.equal(first, torch.arange(1, len(bits) + 1, device="cpu"))
    must(numbered, "partial tiles must be numbered as they first appear")
    counts = bitmask.live_scores(bits)
    must(dynamic or bool((counts > 0).all()), "a tile with no live score must not be stored")
    every = counts == mask.block_q * mask.block_k
    must(dynamic or not bool(every.any()), "a tile with every score live must be tile 0")
    must(bool(((bits & ~bitmask.full_word(mask.block_k)) == 0).all()), "bits past the block must be 0")
    must(dynamic or len(bitmask.deduplicate(bits)[0]) == len(bits), "equal partial tiles must be stored once")
    must(_past_the_ends(mask, rows % row_blocks, indices, tile, bits) == 0, "scores past q_len or k_len must be dead")
    pattern = mask.pattern.cpu().long()
    must(bool(((pattern >= 0) & (pattern < patterns)).all()), f"pattern must lie in 0..{patterns - 1}")
    seen = number_by_first_appearance(pattern.reshape(-1))
    numbered = dynamic or torch.equal(pattern.reshape(-1)[seen[1]], torch.arange(patterns, device="cpu"))
    must(numbered, "patterns must be numbered as they first appear, and each one used")
    listed = patterns_of(indptr.numpy(), indices.numpy(), tile.numpy(), row_blocks)
    distinct = dynamic or len(distinct_patterns(listed)[0]) == patterns
    must(distinct, "equal patterns must be stored once")
    if mask.lengths is not None:
        q_lengths, k_lengths = mask.lengths.cpu()
        must(_lie_in(q_lengths, mask.q_len), f"lengths of queries must lie in 0..{mask.q_len}")
        must(_lie_in(k_lengths, mask.k_len), f"lengths of keys must lie in 0..{mask.k_len}")


def _lie_in(numbers: Tensor, most: int) -> bool:
    return bool(((numbers >= 0) & (numbers <= most)).all())


def _past_the_ends(mask: BlockMask, rows: Tensor, cols: Tensor, tile: Tensor, bits: Tensor) -> int:
    (row_blocks, col_blocks), count = mask.blocks, 0
    live_q = mask.q_len - (row_blocks - 1) * mask.block_q
    live_k = mask.k_len - (col_blocks - 1) * mask.block_k
    choices = bitmask.choices(bits, mask.block_k)
    for last_q in (False, True):
        for last_k in (False, True):
            here = ((rows == row_blocks - 1) == last_q) & ((cols == col_blocks - 1) == last_k)
            inside = bitmask.rectangle(
                mask.block_q, mask.block_k, live_q if last_q else mask.block_q, live_k if last_k else mask.block_k,
                bits.device,
            )  # fmt: skip
            count += int(bitmask.live_scores(choices[tile[here].unique()] & ~inside).sum())
    return count
