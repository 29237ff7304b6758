"""The tiles of all patterns of a mask as one flat list, which operations rewrite and finally make canonical."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.build import arrays_of_patterns, arrays_of_tiles
from sparseflash.blockmask.csr import row_of_entry, take_rows
from sparseflash.blockmask.patterns import Pattern
from sparseflash.blockmask.stats import pattern_count
from sparseflash.blockmask.unique import distinct


@dataclass(frozen=True)
class TileList:
    """Tiles in any order, not yet canonical: words may be dead, full, equal or unused, and may reach past the ends.

    `row`: int64 `[E]`, pattern * Mq + block row; `col`: int64 `[E]`, block column; `kind`: int64 `[E]`, 0 for a full
    tile, t > 0 for the scores `words[t - 1]`; `pattern`: int64 `[B or 1, H or 1]`, the pattern numbers in use, 0 ..
    patterns - 1, in order of first appearance.
    """

    q_len: int
    k_len: int
    block_q: int
    block_k: int
    row: Tensor
    col: Tensor
    kind: Tensor
    words: Tensor
    pattern: Tensor
    patterns: int

    @property
    def blocks(self) -> tuple[int, int]:
        return -(-self.q_len // self.block_q), -(-self.k_len // self.block_k)


def tiles_of(mask: BlockMask) -> TileList:
    """All tiles of a mask, without its lengths."""
    return TileList(
        mask.q_len, mask.k_len, mask.block_q, mask.block_k,
        row_of_entry(mask.indptr, len(mask.indices)), mask.indices.long(), mask.tile.long(), mask.bits,
        mask.pattern.long(), pattern_count(mask),
    )  # fmt: skip


def mask_of(made: TileList, lengths: Tensor | None = None) -> BlockMask:
    """The canonical mask of a list. `lengths`: int `[2, B]`, of queries and keys, clamped to the mask's own lengths."""
    arrays = arrays_of_tiles(
        made.q_len, made.k_len, made.block_q, made.block_k,
        made.row, made.col, made.kind, made.words, made.pattern, made.patterns,
    )  # fmt: skip
    return _padded(BlockMask(made.q_len, made.k_len, made.block_q, made.block_k, *arrays), lengths)


def mask_of_patterns(
    like: BlockMask, patterns: Sequence[Pattern], words: Tensor, pattern: Tensor, lengths: Tensor | None
) -> BlockMask:
    """The mask of the size of `like` whose batch elements and heads have the patterns `pattern`, int64 `[B, H]`."""
    numbers = like._numbers()
    return _padded(BlockMask(*numbers, *arrays_of_patterns(*numbers, patterns, words, pattern)), lengths)


def _padded(mask: BlockMask, lengths: Tensor | None) -> BlockMask:
    return mask if lengths is None else mask.with_lengths(q_lengths=lengths[0], k_lengths=lengths[1])


def take_patterns(mask: BlockMask, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of some patterns, which may repeat: `(row, entry)`, with rows counted over the selected patterns."""
    row_blocks = mask.blocks[0]
    rows = chosen[:, None] * row_blocks + torch.arange(row_blocks, device=chosen.device)
    return take_rows(mask.indptr, rows.reshape(-1))


def in_chunks(words_of: Callable[[Tensor], Tensor], recipes: Tensor, words_each: int) -> Tensor:
    """`words_of(recipes)`, a bounded number of recipes at a time."""
    chunks = recipes.split(max(1, bitmask.WORDS_AT_ONCE // words_each))
    return torch.cat([words_of(chunk) for chunk in chunks])


def compose(
    row: Tensor, col: Tensor, kind: Tensor, slot: Tensor, slots: int, *, col_blocks: int, dead: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Groups source tiles into new ones: `(row, col, which, recipes)` of the new tiles.

    Source tile e becomes part `slot[e]` of the new tile `(row[e], col[e])`; a new tile has each part at most once.
    `recipes`: int64 `[C, slots]`, the distinct lists of source kinds (`dead` where nothing is stored); `which`: the
    recipe of each new tile. So the bits have to be computed only once per recipe.
    """
    key, group = distinct(row * col_blocks + col)
    parts = torch.full((len(key), slots), dead, dtype=torch.int32, device=key.device)
    parts[group, slot] = kind.to(torch.int32)
    recipes, which = bitmask.deduplicate(parts.unsqueeze(-1))
    return key // col_blocks, key % col_blocks, which, recipes.squeeze(-1).long()
