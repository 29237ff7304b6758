"""Padded block lists, a count and a row of indices for every block row: the format of FlexAttention and FA4."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.build import SCORES_AT_ONCE, Part, tile_list
from sparseflash.interop.lookup import MaskMod

Lists = tuple[Tensor, Tensor]  # counts int32 [B, H, M], indices int32 [B, H, M, width]


def padded_lists(rows: Tensor, values: Tensor, pattern: Tensor, blocks: int, width: int | None = None) -> Lists:
    """Counts `[B, H, blocks]` and indices `[B, H, blocks, width]`, int32, from the entries of all patterns.

    `rows`, `values`: int `[E]`, the row of each entry (out of `P * blocks`, not decreasing) and the index to list;
    `pattern` int `[B, H]`. Lists are padded with zeros, by default to the longest (at least 1).
    """
    patterns = int(pattern.max()) + 1
    counts = torch.bincount(rows, minlength=patterns * blocks)
    if width is None:
        width = max(int(counts.max()), 1)
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    indices = torch.zeros(patterns * blocks, width, dtype=torch.int32, device=rows.device)
    indices[rows, place] = values.to(torch.int32)
    number = pattern.long()
    return (
        counts.to(torch.int32).view(patterns, blocks)[number].contiguous(),
        indices.view(patterns, blocks, width)[number].contiguous(),
    )


def mask_of_lists(
    q_len: int, k_len: int, block_q: int, block_k: int, partial: Lists, full: Lists | None, mask_mod: MaskMod | None
) -> BlockMask:
    """The mask of lists of full tiles and of partial tiles, where `mask_mod` gives the live scores."""
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    heads, rows, cols = _entries(partial, row_blocks, col_blocks, "partial")
    batch = partial[0].shape[:2]
    if full is None:
        full = partial[0].new_zeros(partial[0].shape), partial[1]
    full_heads, full_rows, full_cols = _entries(full, row_blocks, col_blocks, "full")
    if full[0].shape != partial[0].shape:
        raise ValueError(
            "the lists of full and of partial blocks must have one shape [B, H, M]; got "
            f"{list(full[0].shape)} and {list(partial[0].shape)}."
        )
    if mask_mod is None and len(rows):
        b, h = divmod(int(heads[0]), batch[1])
        raise ValueError(
            f"mask_mod must be given for partial blocks, to say which scores are live; got {len(rows)}, the first "
            f"block ({int(rows[0])}, {int(cols[0])}) of head {h} of batch element {b}."
        )
    found, kinds, offset = [], [], 0
    if mask_mod is not None and len(rows):
        for e in torch.arange(len(rows), device=rows.device).split(max(1, SCORES_AT_ONCE // (block_q * block_k))):
            number = heads[e] // batch[1], heads[e] % batch[1]
            live = _evaluate(mask_mod, *number, rows[e], cols[e], q_len, k_len, block_q, block_k)
            distinct, inverse = bitmask.deduplicate(bitmask.pack(live))
            found.append(distinct)
            kinds.append(inverse + offset)
            offset += len(distinct)
    no_words = torch.zeros(0, block_q, bitmask.words_per_row(block_k), dtype=torch.int32, device=rows.device)
    words = torch.cat([no_words, *found])
    kind = torch.cat([rows[:0], *kinds])
    parts: list[Part] = []
    count = batch[0] * batch[1]
    ends = torch.searchsorted(heads, torch.arange(count + 1, device=heads.device)).tolist()
    full_ends = torch.searchsorted(full_heads, torch.arange(count + 1, device=heads.device)).tolist()
    for n in range(count):
        mine, mine_full = slice(ends[n], ends[n + 1]), slice(full_ends[n], full_ends[n + 1])
        used, tile = torch.unique(kind[mine], return_inverse=True)
        parts.append(
            (
                torch.cat([rows[mine], full_rows[mine_full]]),
                torch.cat([cols[mine], full_cols[mine_full]]),
                torch.cat([tile + 1, torch.zeros_like(full_rows[mine_full])]),
                words[used],
            )
        )
    return BlockMask._of(q_len, k_len, block_q, block_k, parts, torch.arange(count, device="cpu").view(*batch))


def _entries(lists: Lists, row_blocks: int, col_blocks: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """The entries of the lists, in order: `b * H + h`, block row and block column of each, int64 `[E]`."""
    counts, indices = lists
    if counts.ndim != 3 or indices.shape[:3] != counts.shape or indices.ndim != 4 or counts.shape[2] != row_blocks:
        raise ValueError(
            f"the lists of {name} blocks must have shapes [B, H, {row_blocks}] and [B, H, {row_blocks}, width]; got "
            f"{list(counts.shape)} and {list(indices.shape)}."
        )
    if counts.numel() == 0:
        raise ValueError(f"the lists of {name} blocks must have a batch element and a head; got {list(counts.shape)}.")
    if int(counts.min()) < 0 or int(counts.max()) > indices.shape[3]:
        raise ValueError(
            f"counts of {name} blocks must lie in 0..{indices.shape[3]}, the width of their lists; got "
            f"{int(counts.min())}..{int(counts.max())}."
        )
    listed = torch.arange(indices.shape[3], device=counts.device) < counts.unsqueeze(-1)
    b, h, i, _ = listed.nonzero(as_tuple=True)
    i, j = tile_list(i, indices[listed], row_blocks, col_blocks)
    return b * counts.shape[1] + h, i, j


def _evaluate(
    mask_mod: MaskMod, b: Tensor, h: Tensor, rows: Tensor, cols: Tensor, q_len: int, k_len: int, block_q: int,
    block_k: int,
) -> Tensor:  # fmt: skip
    """The live scores of these tiles of these heads: bool `[E, block_q, block_k]`."""
    from torch.nn.attention.flex_attention import create_mask

    # A mask_mod is written for single numbers and need not broadcast. create_mask is FlexAttention's own way of calling
    # it; its batch elements are tiles here. Positions past the end must not reach a mask_mod.
    def of_tile(e: Tensor, _: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q = (rows[e] * block_q + q_idx).clamp(max=q_len - 1)
        k = (cols[e] * block_k + kv_idx).clamp(max=k_len - 1)
        return mask_mod(b[e], h[e], q, k)

    live = create_mask(of_tile, len(rows), 1, block_q, block_k, device=rows.device)[:, 0]
    if live.dtype != torch.bool:
        raise TypeError(f"mask_mod must return bools (True: live); got {live.dtype}.")
    return live
