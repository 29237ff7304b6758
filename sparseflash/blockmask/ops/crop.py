"""The mask of a range of the queries and a range of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import integer
from sparseflash.blockmask.csr import take_rows
from sparseflash.blockmask.ops.tilelist import TileList, compose, in_chunks, mask_of
from sparseflash.blockmask.stats import pattern_count

Range = Sequence[int | None]


def crop(mask: BlockMask, q: Range | None, k: Range | None) -> BlockMask:
    """See `BlockMask.crop`."""
    q_start, q_stop = _bounds("q", q, mask.q_len)
    k_start, k_stop = _bounds("k", k, mask.k_len)
    if (q_stop - q_start, k_stop - k_start) == (mask.q_len, mask.k_len):
        return mask
    lengths = None
    if mask.lengths is not None:
        lengths = mask.lengths - mask.lengths.new_tensor([[q_start], [k_start]])
    made = _crop_queries(mask, q_start, q_stop)
    made = _crop_keys(made, k_start, k_stop)
    return mask_of(made, lengths)


def _bounds(name: str, given: Range | None, length: int) -> tuple[int, int]:
    if given is None:
        return 0, length
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(f"{name} must be a pair of tokens (start, stop); got {given!r}.")
    start = 0 if given[0] is None else integer(given[0], f"{name}'s start", "tokens")
    stop = length if given[1] is None else integer(given[1], f"{name}'s stop", "tokens")
    if not 0 <= start < stop <= length:
        raise ValueError(f"{name} must be (start, stop) with 0 <= start < stop <= {length}; got ({start}, {stop}).")
    return start, stop


def _crop_queries(mask: BlockMask, start: int, stop: int) -> TileList:
    row_blocks, patterns = mask.blocks[0], pattern_count(mask)
    first, shift = start // mask.block_q, start % mask.block_q
    rows = torch.arange(first, -(-stop // mask.block_q), device=mask.device)
    new_rows = -(-(stop - start) // mask.block_q)
    flat = torch.arange(patterns, device=mask.device)[:, None] * row_blocks + rows  # [P, rows]
    which, entry = take_rows(mask.indptr, flat.reshape(-1))
    made = TileList(
        stop - start, mask.k_len, mask.block_q, mask.block_k,
        which // len(rows) * new_rows + which % len(rows), mask.indices[entry].long(), mask.tile[entry].long(),
        mask.bits, mask.pattern.long(), patterns,
    )  # fmt: skip
    if shift == 0:
        return made
    # A new tile is the lower part of one old tile followed by the upper part of the next.
    i = which % len(rows)
    slot, upper, lower = _halves(i, new_rows)
    source = torch.cat([upper, lower])
    known = bitmask.choices(made.words, made.block_k)
    row, col, recipe, recipes = compose(
        (which // len(rows))[source] * new_rows + i[source] - slot, made.col[source], made.kind[source], slot, 2,
        col_blocks=made.blocks[1], dead=len(known) - 1,
    )  # fmt: skip
    words = in_chunks(
        lambda some: torch.cat([known[some[:, 0], shift:], known[some[:, 1], :shift]], dim=1), recipes, known[0].numel()
    )
    return replace(made, row=row, col=col, kind=recipe + 1, words=words)


def _crop_keys(made: TileList, start: int, stop: int) -> TileList:
    first, shift = start // made.block_k, start % made.block_k
    new_cols = -(-(stop - start) // made.block_k)
    kept = (made.col >= first) & (made.col < -(-stop // made.block_k))
    row, col, kind = made.row[kept], made.col[kept] - first, made.kind[kept]
    made = replace(made, k_len=stop - start, row=row, col=col, kind=kind)
    if shift == 0:
        return made
    # A new tile is the right part of one old tile followed by the left part of the next.
    slot, right, left = _halves(col, new_cols)
    source = torch.cat([right, left])
    known = bitmask.choices(made.words, made.block_k)
    row, col, recipe, recipes = compose(
        row[source], col[source] - slot, kind[source], slot, 2, col_blocks=new_cols, dead=len(known) - 1
    )
    words = in_chunks(
        lambda some: _keys_from(known[some[:, 0]], known[some[:, 1]], shift, made.block_k), recipes, known[0].numel()
    )
    return replace(made, row=row, col=col, kind=recipe + 1, words=words)


def _halves(i: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """`(slot, first, second)`: the old blocks i that supply the first part of new block i, then those that supply the
    second part of new block i - 1, and the slot, 0 or 1, of all of them in that order.
    """
    first, second = (i < blocks).nonzero().squeeze(1), (i > 0).nonzero().squeeze(1)
    return torch.cat([torch.zeros_like(first), torch.ones_like(second)]), first, second


def _keys_from(left: Tensor, right: Tensor, shift: int, block_k: int) -> Tensor:
    """The words of the keys from `shift` on, of two tiles side by side: int32 `[E, block_q, W]` each."""
    if block_k < bitmask.WORD:
        return ((left | (right << block_k)) >> shift) & bitmask.full_word(block_k)
    width, words, bits = left.shape[-1], shift // bitmask.WORD, shift % bitmask.WORD
    both = torch.cat([left, right], dim=-1)
    low = both[..., words : words + width]
    if bits == 0:
        return low
    # The shift of an int32 copies the sign bit; those copies are masked off.
    low = (low >> bits) & ((1 << (bitmask.WORD - bits)) - 1)
    return low | (both[..., words + 1 : words + 1 + width] << (bitmask.WORD - bits))
