"""Masks for tokens in another order.

An order that moves whole blocks only moves tiles. Any other gathers each new tile's rows of words from rows of old
tiles: first for queries, then, through the transpose, for keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import has_integers, plain_tensor, tensor_of
from sparseflash.blockmask.csr import take_rows
from sparseflash.blockmask.ops.padding import bake_lengths
from sparseflash.blockmask.ops.tilelist import TileList, mask_of, tiles_of
from sparseflash.blockmask.ops.transpose import transpose
from sparseflash.blockmask.stats import pattern_count
from sparseflash.blockmask.unique import distinct

ENTRIES_AT_ONCE = 1 << 20  # source tiles gathered at a time: about ten arrays of 8 MB
PARTS_AT_ONCE = 1 << 24  # entries of the recipes of new tiles at a time: 64 MB


def permute(mask: BlockMask, order: Any, q: Any, k: Any) -> BlockMask:
    """See `BlockMask.permute`."""
    if order is not None:
        if q is not None or k is not None:
            raise ValueError("permute must be given either one order for both sides or q and k; got both.")
        if mask.q_len != mask.k_len:
            raise ValueError(
                "permute must be given q or k if q_len and k_len differ, not one order for both sides; "
                f"got {mask.q_len} x {mask.k_len}."
            )
        q = k = _permutation("order", order, mask.q_len, mask.device)
    else:
        if q is None and k is None:
            raise ValueError("permute must be given order, q or k; got none of them.")
        q = None if q is None else _permutation("q", q, mask.q_len, mask.device)
        k = None if k is None else _permutation("k", k, mask.k_len, mask.device)
    mask = bake_lengths(mask)
    if q is not None:
        mask = _permute_queries(mask, q)
    if k is not None:
        mask = _permute_keys(mask, k)
    return mask


def _permutation(name: str, given: Any, length: int, device: torch.device) -> Tensor:
    """The order as int64 `[length]` on the mask's device, checked to be a permutation."""
    try:
        order = tensor_of(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must hold integer token numbers; got {given!r}.") from error
    plain_tensor(order, name)
    if not has_integers(order):
        raise TypeError(f"{name} must hold integer token numbers; got {order.dtype}.")
    if order.ndim != 1 or len(order) != length:
        raise ValueError(f"{name} must have shape [{length}], one old token for each new one; got {list(order.shape)}.")
    order = order.to(device, torch.int64)
    low, high = int(order.min()), int(order.max())
    if low < 0 or high >= length:
        raise ValueError(f"{name} must hold tokens from 0 to {length - 1}; got {low}..{high}.")
    times = torch.bincount(order, minlength=length)
    if int(times.max()) > 1:
        token = int(times.argmax())
        raise ValueError(f"{name} must hold every token once; got token {token} {int(times[token])} times.")
    return order


def _permute_queries(mask: BlockMask, order: Tensor) -> BlockMask:
    goes_to = _block_moves(order, mask.block_q)
    if goes_to is None:
        return _gather_queries(mask, order)
    stored, row_blocks = tiles_of(mask), mask.blocks[0]
    pattern, i = stored.row // row_blocks, stored.row % row_blocks
    return mask_of(replace(stored, row=pattern * row_blocks + goes_to[i]))


def _permute_keys(mask: BlockMask, order: Tensor) -> BlockMask:
    goes_to = _block_moves(order, mask.block_k)
    if goes_to is None:
        return transpose(_gather_queries(transpose(mask), order))
    stored = tiles_of(mask)
    return mask_of(replace(stored, col=goes_to[stored.col]))


def _block_moves(order: Tensor, block: int) -> Tensor | None:
    """Where each block goes, or None if the order does not move whole blocks; a ragged last block must then stay the
    last.
    """
    starts = order[::block]
    tokens = torch.arange(len(order), device=order.device)
    if bool((starts % block != 0).any()) or not torch.equal(order, starts[tokens // block] + tokens % block):
        return None
    goes_to = torch.empty_like(starts)
    goes_to[starts // block] = torch.arange(len(starts), device=order.device)
    return goes_to


@dataclass(frozen=True)
class _Sources:
    """The old block rows that make up each new block row.

    New block row i takes queries from the old block rows `old[starts[i] : starts[i + 1]]`, its slots 0, 1, ... Query r
    of a new tile with recipe c is query `offset[c, r]` of the tile in slot `slot[c, r]`; `recipe [Mq]` is the recipe of
    each block row. So the bits for a recipe and a list of source tiles are computed once, however often the combination
    occurs.
    """

    starts: Tensor
    old: Tensor
    recipe: Tensor
    slot: Tensor
    offset: Tensor

    @property
    def slots(self) -> int:
        return int(self.starts.diff().max())


def _sources(order: Tensor, block: int) -> _Sources:
    row_blocks = -(-len(order) // block)
    i = torch.arange(len(order), device=order.device) // block
    pairs, which = distinct(i * row_blocks + order // block)
    starts = torch.searchsorted(pairs // row_blocks, torch.arange(row_blocks + 1, device=order.device))
    taken = (which - starts[i]) * block + order % block
    # Rows past the end may be taken from anywhere: `mask_of` cuts them off.
    padded = taken.new_zeros(row_blocks * block)
    padded[: len(order)] = taken
    recipes, recipe = bitmask.deduplicate(padded.view(row_blocks, block, 1).to(torch.int32))
    recipes = recipes.squeeze(-1).long()
    return _Sources(starts, pairs % row_blocks, recipe, recipes // block, recipes % block)


def _gather_queries(mask: BlockMask, order: Tensor) -> BlockMask:
    row, col, kind, words = _concatenated(_gathered(mask, _sources(order, mask.block_q)))
    return mask_of(
        TileList(
            mask.q_len, mask.k_len, mask.block_q, mask.block_k,
            row, col, kind, words, mask.pattern.long(), pattern_count(mask),
        )
    )  # fmt: skip


def _concatenated(parts: Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Concatenates several `(row, col, kind, words)`; in each, words are numbered from 1."""
    rows, cols, kinds, words = [], [], [], []
    count = 0
    for row, col, kind, new in parts:
        rows.append(row)
        cols.append(col)
        kinds.append(torch.where(kind > 0, kind + count, 0))
        words.append(new)
        count += len(new)
    return torch.cat(rows), torch.cat(cols), torch.cat(kinds), torch.cat(words)


def _gathered(mask: BlockMask, sources: _Sources) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    (row_blocks, col_blocks), device = mask.blocks, mask.device
    slots, known = sources.slots, bitmask.choices(mask.bits, mask.block_k)
    dead = len(known) - 1
    for flat in _row_chunks(mask, sources):
        which, u = take_rows(sources.starts, flat % row_blocks)
        slot = u - sources.starts[flat % row_blocks][which]
        pair, entry = take_rows(mask.indptr, (flat // row_blocks * row_blocks)[which] + sources.old[u])
        key, group = distinct(which[pair] * col_blocks + mask.indices[entry])
        parts = torch.full((len(key), slots + 1), dead, dtype=torch.int32, device=device)
        parts[group, slot[pair]] = mask.tile[entry]
        row, col = flat[key // col_blocks], key % col_blocks
        parts[:, slots] = sources.recipe[row % row_blocks].to(torch.int32)
        recipes, number = bitmask.deduplicate(parts.unsqueeze(-1))
        kind, words = bitmask.classify(
            lambda some: _words_of(some, sources, known), recipes.squeeze(-1).long(), mask.block_q, mask.block_k
        )
        kind = kind[number]
        live = kind >= 0
        yield row[live], col[live], kind[live], words


def _row_chunks(mask: BlockMask, sources: _Sources) -> Iterator[Tensor]:
    row_blocks, patterns = mask.blocks[0], pattern_count(mask)
    counts = mask.indptr.diff().long().view(patterns, row_blocks)[:, sources.old]  # [P, pairs]
    before = torch.cat([counts.new_zeros(patterns, 1), counts.cumsum(1)], dim=1)
    work = before[:, sources.starts[1:]] - before[:, sources.starts[:-1]]
    total = work.reshape(-1).cumsum(0)
    limit = max(1, min(ENTRIES_AT_ONCE, PARTS_AT_ONCE // (sources.slots + 1)))
    # A block row belongs to the chunk in which its work ends, so a chunk exceeds the limit by at most one block row.
    sizes = torch.unique_consecutive(total // limit, return_counts=True)[1]
    yield from torch.arange(patterns * row_blocks, device=mask.device).split(sizes.tolist())


def _words_of(parts: Tensor, sources: _Sources, known: Tensor) -> Tensor:
    """The words of new tiles; `parts` int64 `[C, slots + 1]` holds the kind of tile in each slot, then the recipe."""
    block_q, width = known.shape[1:]
    recipe = parts[:, -1]
    line = parts.gather(1, sources.slot[recipe]) * block_q + sources.offset[recipe]  # [C, block_q]
    return known.view(-1, width)[line]
