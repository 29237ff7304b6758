"""From lists of tiles and dense matrices to the canonical arrays of a mask.

NumPy sorts and numbers lists of tiles on the CPU, because PyTorch is slower on short arrays. Bits stay on their device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.arguments import known_integers
from sparseflash.limits import check_count

SCORES_AT_ONCE = 1 << 21  # scores evaluated or unpacked at a time: about 25 MB

TILES_AT_ONCE = 1 << 16  # tiles of a list handled at a time: temporaries of a list of millions stay in a CPU's caches

Integers = NDArray[np.int64]
Numbers = NDArray[np.int32]

Part = tuple[Tensor, Tensor, Tensor, Tensor]


def tiles_of_dense(dense: Tensor, block_q: int, block_k: int) -> Part:
    """The tiles of a bool matrix `[Nq, Nk]`."""
    q_len, k_len = dense.shape
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    padded = torch.zeros(row_blocks * block_q, col_blocks * block_k, dtype=torch.bool, device=dense.device)
    padded[:q_len, :k_len] = dense
    grid = padded.view(row_blocks, block_q, col_blocks, block_k).transpose(1, 2)  # [Mq, Mk, block_q, block_k]
    some, every = grid.any(-1).any(-1), grid.all(-1).all(-1)
    rows, cols = some.nonzero(as_tuple=True)
    partial = ~every[rows, cols]
    tile = torch.zeros_like(rows)
    tile[partial] = torch.arange(1, int(partial.sum()) + 1, device=dense.device)
    return rows, cols, tile, bitmask.pack(grid[rows[partial], cols[partial]])


def tile_list(rows: Any, cols: Any, row_blocks: int, col_blocks: int) -> tuple[Tensor, Tensor]:
    """A list of tiles as int64, checked to lie inside the matrix."""
    device = next((ids.device for ids in (rows, cols) if isinstance(ids, Tensor)), torch.device("cpu"))
    rows, cols = known_integers(rows, "rows", device), known_integers(cols, "cols", device)
    if rows.ndim != 1 or rows.shape != cols.shape:
        raise ValueError(f"rows and cols must have one shape [E]; got {list(rows.shape)} and {list(cols.shape)}.")
    for name, ids, stop in (("rows", rows, row_blocks), ("cols", cols, col_blocks)):
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < stop):
            raise ValueError(f"{name} must lie in 0..{stop - 1}; got {int(ids.min())}..{int(ids.max())}.")
    return rows, cols


def arrays_of(
    q_len: int, k_len: int, block_q: int, block_k: int, parts: list[Part], batch: int, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The canonical `(indptr, indices, tile, bits, pattern)` of one list of tiles per (batch element, head)."""
    rows, cols, tile, words = parts[0]
    if len(parts) > 1:
        row_blocks, offset = -(-q_len // block_q), 0
        columns: list[Part] = []
        for number, (i, j, t, part_words) in enumerate(parts):
            columns.append((i + number * row_blocks, j, torch.where(t > 0, t + offset, t), part_words))
            offset += len(part_words)
        rows, cols, tile, words = (torch.cat(column) for column in zip(*columns, strict=True))
    numbers = torch.arange(len(parts), device="cpu").view(batch, heads)
    return arrays_of_tiles(q_len, k_len, block_q, block_k, rows, cols, tile, words, numbers, len(parts))


def arrays_of_tiles(
    q_len: int, k_len: int, block_q: int, block_k: int, rows: Tensor, cols: Tensor, tile: Tensor, words: Tensor,
    pattern: Tensor, patterns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The canonical `(indptr, indices, tile, bits, pattern)` of one list of the tiles of all patterns.

    `rows`: int64 `[E]`, pattern * Mq + block row. `words`: shared by all patterns; entries may be dead, full, equal or
    unused. `pattern`: int64 `[B, H]`, 0 .. patterns - 1, numbered by first appearance; two patterns may turn out equal.
    The arrays are made on the device of the words.
    """
    row_blocks = -(-q_len // block_q)
    remedy = "Use larger blocks, or fewer patterns."
    check_count("patterns x block rows", patterns, row_blocks, remedy=remedy)
    check_count("tiles of a mask", len(rows), remedy=remedy)
    i, j, t = (x.cpu().numpy() for x in (rows, cols, tile))
    indptr, indices, kinds, bits = _assemble(q_len, k_len, block_q, block_k, i, j, t, words, patterns)
    keep, number = distinct_patterns(indptr, indices, kinds, row_blocks)
    if len(keep) < patterns:
        # The first copy of each pattern is kept, so partial tiles stay numbered by first appearance.
        starts = indptr[::row_blocks].tolist()
        counts = np.diff(indptr).reshape(patterns, row_blocks)[keep].reshape(-1)
        indptr = np.concatenate([[0], counts.cumsum()])
        indices = np.concatenate([indices[starts[p] : starts[p + 1]] for p in keep])
        kinds = np.concatenate([kinds[starts[p] : starts[p + 1]] for p in keep])
    number_of = np.array(number)[pattern.cpu().numpy()]
    made = [
        torch.from_numpy(x.astype(np.int32, copy=False)).to(words.device) for x in (indptr, indices, kinds, number_of)
    ]
    return made[0], made[1], made[2], bits.contiguous(), made[3]


def _assemble(
    q_len: int, k_len: int, block_q: int, block_k: int, rows: Integers, cols: Integers, tile: Integers, words: Tensor,
    patterns: int,
) -> tuple[Integers, Numbers, Numbers, Tensor]:  # fmt: skip
    """Sorts the tiles, trims them at the ends, classifies and deduplicates them: `(indptr, indices, tile, bits)`."""
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    if not _in_order(rows, cols):
        order = (rows * col_blocks + cols).argsort(kind="stable")  # merges sorted runs, which most lists consist of
        rows, cols, tile = rows[order], cols[order], tile[order]
        if not _in_order(rows, cols):
            raise ValueError("a tile must not be listed twice.")
    # A tile at an end loses the scores past it. Few (tile, end) pairs are distinct, and each is computed once. Full
    # tiles that no end cuts, the most frequent kind, are left out. Lists of millions are read in portions, three times:
    # the numbers of their pairs would take more time to keep than to make again.
    last_row = row_blocks - 1 if q_len % block_q else -1
    last_col = col_blocks - 1 if k_len % block_k else -1

    def portion(start: int) -> tuple[int, Integers, Integers]:
        stop = start + TILES_AT_ONCE
        own = tile[start:stop]
        special = own > 0
        if last_row >= 0:
            row = rows[start:stop] if patterns == 1 else rows[start:stop] % row_blocks
            special |= row == last_row
        if last_col >= 0:
            special |= cols[start:stop] == last_col
        listed = np.flatnonzero(special)
        pair = own[listed] * 4
        if last_row >= 0:
            pair += row[listed] == last_row
        if last_col >= 0:
            pair += 2 * (cols[start:stop][listed] == last_col)
        return start, listed, pair

    starts = range(0, len(tile), TILES_AT_ONCE)
    kept = [portion(0)] if len(starts) == 1 else None
    occurs = np.zeros(4 * (len(words) + 1), dtype=np.bool_)
    for _, _, pair in kept or map(portion, starts):
        occurs[pair] = True
    kind_of = np.zeros(len(occurs), dtype=np.int64)
    pairs = np.flatnonzero(occurs)
    ends = _ends(q_len, k_len, block_q, block_k, words.device)
    words = words if len(words) else words.new_zeros(1, *words.shape[1:])  # indexing needs one entry

    def trimmed(some: Integers) -> Tensor:
        made = words.index_select(0, torch.from_numpy(np.maximum(some // 4 - 1, 0)).to(words.device))
        if cut := int(np.searchsorted(some, 4)):
            made[:cut] = bitmask.full_word(block_k)
        return made if ends is None else made & ends.index_select(0, torch.from_numpy(some % 4).to(words.device))

    kind, bits = bitmask.classify(trimmed, pairs, block_q, block_k)
    kind_of[pairs] = kind.cpu().numpy()
    # Partial tiles are numbered by first appearance in the rows, so that equal masks have equal arrays.
    first = np.full(len(bits) + 1, len(tile), dtype=np.int64)
    first[0] = -1
    for start, listed, pair in kept or map(portion, starts):
        kinds = kind_of[pair]
        new = np.flatnonzero(first[kinds] == len(tile))  # a dead tile's number, -1, is the last kind's
        new = new[kinds[new] > 0]
        first[kinds[new][::-1]] = listed[new][::-1] + start  # the last write wins: the first appearance
    if not (first[1:] > first[:-1]).all():
        order = first[1:].argsort()
        number = np.arange(len(first) + 1)
        number[order + 1] = np.arange(1, len(first))
        number[-1] = -1
        kind_of = number[kind_of]
        bits = bits.index_select(0, torch.from_numpy(order).to(bits.device))
    all_kinds = np.zeros(len(tile), dtype=np.int32)
    numbers = kind_of.astype(np.int32)
    for start, listed, pair in kept or map(portion, starts):
        all_kinds[start : start + TILES_AT_ONCE][listed] = numbers[pair]
    if (kind_of < 0).any():
        live = all_kinds >= 0
        rows, cols, all_kinds = rows[live], cols[live], all_kinds[live]
    indptr = np.searchsorted(rows, np.arange(patterns * row_blocks + 1))
    return indptr, cols.astype(np.int32), all_kinds, bits


def _in_order(rows: Integers, cols: Integers) -> bool:
    for start in range(0, len(rows), TILES_AT_ONCE):
        stop = start + TILES_AT_ONCE + 1
        i, j = rows[start:stop], cols[start:stop]
        row, next_row = i[:-1], i[1:]
        if not ((next_row > row) | ((next_row == row) & (j[1:] > j[:-1]))).all():
            return False
    return True


def _ends(q_len: int, k_len: int, block_q: int, block_k: int, device: torch.device) -> Tensor | None:
    """The scores inside the ends, words `[4, block_q, W]`: uncut, cut in queries, in keys, in both; None if no tile is
    cut.
    """
    live_q, live_k = (q_len - 1) % block_q + 1, (k_len - 1) % block_k + 1
    if (live_q, live_k) == (block_q, block_k):
        return None
    ends = np.full((4, block_q, bitmask.words_per_row(block_k)), bitmask.full_word(block_k), dtype=np.int32)
    ends[1::2, live_q:] = 0
    ends[2:] &= bitmask.below(live_k, block_k)
    return torch.from_numpy(ends).to(device)


def distinct_patterns(
    indptr: Integers, indices: Numbers, tile: Numbers, row_blocks: int
) -> tuple[list[int], list[int]]:
    """`(keep, pattern)`: the first pattern of each distinct kind, and the index in `keep` of every pattern's kind."""
    patterns = (len(indptr) - 1) // row_blocks
    if patterns == 1:
        return [0], [0]
    counts = np.diff(indptr).reshape(patterns, row_blocks)
    starts = indptr[::row_blocks].tolist()
    number: dict[tuple[bytes, bytes, bytes], int] = {}
    keep: list[int] = []
    pattern: list[int] = []
    for p in range(patterns):
        span = slice(starts[p], starts[p + 1])
        arrays = (counts[p].tobytes(), indices[span].tobytes(), tile[span].tobytes())
        if arrays not in number:
            number[arrays] = len(keep)
            keep.append(p)
        pattern.append(number[arrays])
    return keep, pattern
