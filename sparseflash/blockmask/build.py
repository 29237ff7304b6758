"""From lists of tiles and dense matrices to the canonical arrays of a mask.

NumPy sorts and numbers lists of tiles on the CPU, because PyTorch is slower on short arrays. Bits stay on their device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.arguments import known_integers
from sparseflash.blockmask.patterns import (
    TILES_AT_ONCE,
    Integers,
    Numbers,
    Pattern,
    distinct_patterns,
    joined,
    kinds_by_appearance,
    patterns_of,
)
from sparseflash.blockmask.unique import number_by_first_appearance
from sparseflash.limits import check_count

SCORES_AT_ONCE = 1 << 21  # scores evaluated or unpacked at a time: about 25 MB

Part = tuple[Tensor, Tensor, Tensor, Tensor]

_REMEDY = "Use larger blocks, or fewer patterns."

_CPU = torch.device("cpu")
_ONE = np.zeros((1, 1), dtype=np.int64)  # one pattern for all batch elements and heads


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
    q_len: int, k_len: int, block_q: int, block_k: int, parts: list[Part], numbers: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The canonical `(indptr, indices, tile, bits, pattern)` of lists of tiles.

    Head h of batch element b has the list `parts[numbers[b, h]]`, int64 `[B or 1, Hq or 1]`, numbered by first
    appearance; by default there is one list for each head.
    """
    rows, cols, tile, words = parts[0]
    if len(parts) > 1:
        row_blocks, offset = -(-q_len // block_q), 0
        columns: list[Part] = []
        for number, (i, j, t, part_words) in enumerate(parts):
            columns.append((i + number * row_blocks, j, torch.where(t > 0, t + offset, t), part_words))
            offset += len(part_words)
        rows, cols, tile, words = (torch.cat(column) for column in zip(*columns, strict=True))
    if numbers is None:
        numbers = torch.arange(len(parts), device="cpu").view(1, -1)
    return arrays_of_tiles(q_len, k_len, block_q, block_k, rows, cols, tile, words, numbers, len(parts))


def arrays_of_tiles(
    q_len: int, k_len: int, block_q: int, block_k: int, rows: Tensor, cols: Tensor, tile: Tensor, words: Tensor,
    pattern: Tensor, patterns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The canonical `(indptr, indices, tile, bits, pattern)` of one list of the tiles of all patterns, in any order.

    `rows`: int64 `[E]`, pattern * Mq + block row. `words`: shared by all patterns; entries may be dead, full, equal or
    unused. `pattern`: int64 `[B, H]`, 0 .. patterns - 1, numbered by first appearance; two patterns may turn out equal.
    The arrays are made on the device of the words.
    """
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    check_count("patterns x block rows", patterns, row_blocks, remedy=_REMEDY)
    check_count("tiles of a mask", len(rows), remedy=_REMEDY)
    i, j, kind = (x.cpu().numpy() for x in (rows, cols, tile))
    if not _in_order(i, j):
        # A stable sort merges sorted runs, which most lists consist of.
        order = (i.astype(np.int64) * col_blocks + j).argsort(kind="stable")
        i, j, kind = i[order], j[order], kind[order]
        if not _in_order(i, j):
            raise ValueError("a tile must not be listed twice.")
    indptr = i.searchsorted(np.arange(patterns * row_blocks + 1, dtype=i.dtype))
    listed = indptr, j.astype(np.int32), kind.astype(np.int32)
    return arrays_of_rows(q_len, k_len, block_q, block_k, *listed, len(words), words, pattern.cpu().numpy())


def arrays_of_patterns(
    q_len: int, k_len: int, block_q: int, block_k: int, patterns: Sequence[Pattern], words: Tensor, pattern: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same arrays from whole patterns, which may be equal or unused. `pattern`: int64 `[B, H]`."""
    number, appears = number_by_first_appearance(pattern.reshape(-1))
    used = [patterns[p] for p in pattern.reshape(-1)[appears].tolist()]
    check_count("patterns x block rows", len(used), -(-q_len // block_q), remedy=_REMEDY)
    check_count("tiles of a mask", sum(len(each.tile) for each in used), remedy=_REMEDY)
    keep, kept_as = distinct_patterns(used)
    of_head = np.array(kept_as)[number.view(pattern.shape).cpu().numpy()]
    listed = joined([used[p] for p in keep])
    return arrays_of_rows(q_len, k_len, block_q, block_k, *listed, len(words), words, of_head)


def arrays_of_rows(
    q_len: int, k_len: int, block_q: int, block_k: int, indptr: Integers, cols: Numbers, kind: Numbers, kinds: int,
    words: Tensor | Callable[[Integers], Tensor], pattern: Integers = _ONE,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same arrays from tiles listed row by row, the rows of pattern 1 after those of pattern 0.

    The tiles of row i are at `cols[indptr[i] : indptr[i + 1]]`, ascending. `kind`: 0 for a full tile; the scores of a
    tile of kind t, at most `kinds`, are `words[t - 1]` or `words([t - 1])[0]`, int32 `[block_q, W]`, and may be all,
    none, or those of another kind. Both lists are written to, and may become arrays of the mask. `pattern`: as in
    `arrays_of_tiles`. The arrays are made on the device of the words.
    """
    device = words.device if isinstance(words, Tensor) else _CPU
    indptr, cols, kind, bits = _canonical(q_len, k_len, block_q, block_k, indptr, cols, kind, kinds, words, device)
    row_blocks = -(-q_len // block_q)
    if len(indptr) - 1 > row_blocks:
        listed = patterns_of(indptr, cols, kind, row_blocks)
        keep, number = distinct_patterns(listed)
        pattern = np.array(number)[pattern]
        if len(keep) < len(listed):
            # The first copy of each pattern is kept, so partial tiles stay numbered by first appearance.
            indptr, cols, kind = joined([listed[p] for p in keep])
    made = [torch.from_numpy(x) for x in (indptr.astype(np.int32), cols, kind, pattern.astype(np.int32))]
    if device != _CPU:
        made = [x.to(device) for x in made]
    return made[0], made[1], made[2], bits, made[3]


def _canonical(
    q_len: int, k_len: int, block_q: int, block_k: int, indptr: Integers, cols: Numbers, kind: Numbers, kinds: int,
    words: Tensor | Callable[[Integers], Tensor], device: torch.device,
) -> tuple[Integers, Numbers, Numbers, Tensor]:  # fmt: skip
    """Trims the tiles at the ends, classifies and deduplicates them: `(indptr, indices, tile, bits)`.

    Lists can have millions of tiles. Kinds are read once and written once, in portions, and no other list of that
    length is made.
    """
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    ends = _ends(q_len, k_len, block_q, block_k, device)
    if kinds == 0 and ends is None:
        shape = 0, block_q, bitmask.words_per_row(block_k)
        return indptr, cols, kind, torch.zeros(shape, dtype=torch.int32, device=device)
    # A tile that is cut at the end of the sequence is of a kind of its own. Few kinds are distinct, and each is
    # computed once. Full tiles that are not cut, the most frequent kind, are left out.
    span = kinds + 1
    check_count("kinds of tiles", 4, span, remedy=_REMEDY)
    if q_len % block_q:
        for start, stop in zip(indptr[row_blocks - 1 :: row_blocks], indptr[row_blocks::row_blocks]):
            kind[start:stop] += span
    if k_len % block_k:
        last = indptr[1:][indptr[1:] > indptr[:-1]] - 1
        kind[last[cols[last] == col_blocks - 1]] += 2 * span
    count = span if ends is None else 4 * span
    # Kinds are classified by first appearance in the rows, so that equal masks have equal arrays.
    found = kinds_by_appearance(kind, count)
    found = found[found > 0]

    def words_of(number: Integers) -> Tensor:
        if isinstance(words, Tensor):
            return words.index_select(0, torch.from_numpy(number).to(device))
        return words(number)

    def trimmed(some: Integers) -> Tensor:
        number = some % span - 1
        partial = number >= 0
        if partial.all():
            made = words_of(number)
        else:
            shape = len(some), block_q, bitmask.words_per_row(block_k)
            made = torch.full(shape, bitmask.full_word(block_k), dtype=torch.int32, device=device)
            made[torch.from_numpy(partial)] = words_of(number[partial])
        return made if ends is None else made & ends.index_select(0, torch.from_numpy(some // span).to(device))

    kind_of, bits = bitmask.classify(trimmed, found, block_q, block_k)
    numbers = np.zeros(count, dtype=np.int32)
    numbers[found] = kind_of.cpu().numpy()
    if (numbers[found] != found).any():
        for start in range(0, len(kind), TILES_AT_ONCE):
            some = kind[start : start + TILES_AT_ONCE]
            numbers.take(some, out=some, mode="clip")  # without this mode, NumPy would make a copy
    if (numbers < 0).any():
        live = kind >= 0
        indptr = indptr - np.flatnonzero(~live).searchsorted(indptr)
        cols, kind = cols[live], kind[live]
    return indptr, cols, kind, bits.contiguous()


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
