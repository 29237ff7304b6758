"""Vertical-slash: chosen columns and chosen diagonals of a causal mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, block_pair, token_counts
from sparseflash.blockmask.unique import distinct
from sparseflash.masks.stack import per_head
from sparseflash.masks.tiling.arguments import is_list, positions
from sparseflash.masks.tiling.diagonals import tiles_at, words_at
from sparseflash.masks.tiling.listing import between
from sparseflash.masks.tiling.signatures import pattern
from sparseflash.masks.tiling.spans import WORDS_AT_ONCE


@pattern
def vertical_slash(q_len: int, *, vertical: Any, slash: Any, block: Block = 128) -> BlockMask:
    """The keys in `vertical` (columns) and the distances in `slash` (diagonals), for all heads or for each head.

    >>> vertical_slash(4096, vertical=range(30), slash=range(100))
    BlockMask(4096 x 4096, blocks of 128, 93 tiles: 0 full + 93 partial (5 distinct), density 3.12 %)

    Score (q, k), in a head with the columns V and the distances S, is live iff

        k <= q  and  (k in V  or  q - k in S)

    Args:
        q_len: tokens.
        vertical, slash: positions of keys, and distances in tokens (0: the main diagonal): a list (or 1-D tensor or
            array) of integers from 0 to `q_len - 1`, in any order, or a list of those for each head (or a 2-D tensor).
            Either, both or neither may be given for each head.
        block: tokens per side of a tile.

    Source: MInference (Jiang et al., 2024, section 3.2), which takes both from the attention of the last 64 queries and
    always includes the first 30 columns and the nearest diagonals. Its kernel widens every diagonal to whole blocks of
    64; this mask does not. Without distance 0 the queries before the first column see nothing.

    A tile that both a column and a diagonal cross stores bits of its own (2 KiB at block 128), so a mask with many
    columns and many scattered diagonals is large; neighbouring columns, or neighbouring diagonals, cost little. Raises
    TypeError or ValueError if an index is not an integer or out of range, or if the numbers of heads differ.

        vertical [0], slash [0, 3]
        X . . . .
        X X . . .
        X . X . .
        X . . X .
        X X . . X

    >>> vertical_slash(4096, vertical=[[0], [1000]], slash=[0, 64]).shape
    (1, 2, 4096, 4096)
    """
    q_len, _ = token_counts(q_len, q_len)
    block_q, block_k = block_pair(block)
    verticals, slashes = _heads(vertical), _heads(slash)
    heads = max(len(verticals), len(slashes))
    if not {len(verticals), len(slashes)} <= {1, heads}:
        raise ValueError(
            f"vertical and slash must be given for equally many heads; got {len(verticals)} and {len(slashes)}."
        )
    masks = []
    for head in range(heads):
        cols = positions(verticals[head % len(verticals)], "vertical", q_len)
        offsets = positions(slashes[head % len(slashes)], "slash", q_len)
        masks.append(_one_head(q_len, cols, offsets, block_q, block_k))
    return per_head(masks)


def _heads(values: Any) -> list[Any]:
    if isinstance(values, Tensor | np.ndarray):
        return list(values) if values.ndim == 2 and len(values) else [values]
    if isinstance(values, Sequence) and len(values) and all(is_list(value) for value in values):
        return list(values)
    return [values]


def _one_head(q_len: int, marked_keys: Tensor, offsets: Tensor, block_q: int, block_k: int) -> BlockMask:
    row_blocks, col_blocks = -(-q_len // block_q), -(-q_len // block_k)
    cols = torch.zeros(col_blocks * block_k, dtype=torch.bool, device="cpu")
    cols[marked_keys] = True
    of_key = bitmask.pack(cols.view(col_blocks, block_k))  # [Mk, W]
    has_cols = cols.view(col_blocks, block_k).any(1)
    marked = has_cols.nonzero()[:, 0]
    first_q = torch.arange(row_blocks, device="cpu") * block_q
    last_q = (first_q + block_q - 1).clamp(max=q_len - 1)
    i, at = between(torch.zeros_like(first_q), torch.searchsorted(marked, last_q // block_k, right=True) - 1)
    column = i * col_blocks + marked[at]
    crossed = tiles_at(offsets, q_len, block_q, block_k)
    slashed = crossed[0] * col_blocks + crossed[1]
    # Both lists are in ascending order, so they can be merged without sorting.
    place = torch.searchsorted(slashed, column)
    alone = torch.cat([slashed, slashed.new_full((1,), -1)])[place] != column
    has_slash = torch.ones(len(slashed) + int(alone.sum()), dtype=torch.bool, device="cpu")
    has_slash[place[alone] + torch.arange(len(has_slash) - len(slashed), device="cpu")] = False
    key = torch.empty(len(has_slash), dtype=torch.int64, device="cpu")
    key[has_slash], key[~has_slash] = slashed, column[alone]
    i, j = key // col_blocks, key % col_blocks
    corner = i * block_q - j * block_k

    # A tile with diagonals only recurs along them, and one with columns only recurs down them; the others are made one
    # by one.
    corners, which = distinct(corner[has_slash])
    of_corner = words_at(offsets, corners, block_q, block_k)
    slash = torch.full_like(key, len(corners))
    slash[has_slash] = which
    below_diagonal = corner >= block_k - 1
    kind = torch.where(has_slash, slash, torch.searchsorted(marked, j) + len(corners)) + 1
    words = [of_corner, of_key[marked][:, None, :].expand(-1, block_q, -1)]
    slashed_words = torch.nn.functional.pad(of_corner, (0, 0, 0, 0, 0, 1))
    offset = len(corners) + len(marked)
    own = (has_cols[j] & (has_slash | ~below_diagonal)).nonzero()[:, 0]
    for some in own.split(max(1, WORDS_AT_ONCE // (block_q * of_key.shape[1]))):
        until = corner[some][:, None] + torch.arange(1, block_q + 1, device="cpu")
        past = torch.from_numpy(bitmask.below(until.numpy(), block_k))
        made = slashed_words.index_select(0, slash[some]) | (of_key[j[some]][:, None, :] & past)
        made, inverse = bitmask.deduplicate(made)
        words.append(made)
        kind[some] = inverse + 1 + offset
        offset += len(made)
    part = (i, j, kind, torch.cat(words))
    return BlockMask._of(q_len, q_len, block_q, block_k, [part])
