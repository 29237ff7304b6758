"""From lists of tiles, dense matrices and predicates to the canonical arrays of a mask."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.arguments import boolean, check_block_count, integer_tensor
from sparseflash.blockmask.unique import distinct, number_by_first_appearance

SCORES_AT_ONCE = 1 << 21  # predicates are evaluated on this many scores at a time: about 25 MB of temporaries
_PAIRS_AT_ONCE = 1 << 22  # block pairs a candidate function sees at a time

# What PyTorch says where Python wants one number of a tensor that has many.
_ONE_NUMBER = (
    "Boolean value of Tensor",
    "cannot be converted to Scalar",
    "only one element tensors can be converted",
    "only integer tensors of a single element can be converted",
    "only 0-dimensional arrays can be converted",
    "only length-1 arrays can be converted",
)

Live = Callable[[Tensor, Tensor], Tensor]
# A block layout, a function of block indices, or a list of tiles: block rows and block columns.
Candidates = Tensor | tuple[Tensor, Tensor] | Callable[[Tensor, Tensor], Tensor]

# The tiles of one pattern: block rows, block columns, and for each tile 0 (full) or t (the words t - 1).
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


def tiles_of_function(
    live: Live,
    q_len: int,
    k_len: int,
    block_q: int,
    block_k: int,
    candidates: Candidates | None,
    device: torch.device,
) -> Part:
    """The tiles of a predicate; see `BlockMask.from_function`."""
    _check_rule(live)
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    if isinstance(candidates, tuple):
        rows, cols = tile_list(*candidates, row_blocks, col_blocks)
        candidates = rows.to(device), cols.to(device)
    elif candidates is not None and not callable(candidates):
        candidates = boolean(candidates, "candidates").to(device)
        if candidates.ndim != 2:
            raise ValueError(f"candidates must have shape [Mq, Mk]; got {list(candidates.shape)}.")
        check_block_count("candidates", candidates, q_len, k_len, block_q, block_k)
    found: list[Part] = []
    offset = 0
    for rows, cols in _candidate_pairs(candidates, row_blocks, col_blocks, device):
        for chosen in torch.arange(len(rows), device=device).split(max(1, SCORES_AT_ONCE // (block_q * block_k))):
            part = _evaluate(live, rows[chosen], cols[chosen], q_len, k_len, block_q, block_k)
            part[2][part[2] > 0] += offset
            offset += len(part[3])
            found.append(part)
    i, j, tile, words = (torch.cat(column) for column in zip(*found, strict=True))
    return i, j, tile, words


def _check_rule(live: Any) -> None:
    """A rule takes two things. FlexAttention's takes four, and the error of calling it would not say so."""
    if not callable(live):
        raise TypeError(f"live must be a function of positions (q_idx, k_idx); got {type(live).__name__}.")
    try:
        signature = inspect.signature(live)
    except ValueError:  # of some functions of C nobody knows
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"live must take two arguments, positions of queries and of keys; got a function of {signature}. "
            "FlexAttention's mask_mod(b, h, q_idx, kv_idx): if it is the same for all b and h, give lambda q, k: "
            "mask_mod(0, 0, q, k); if not, make a mask for each and put them together with masks.per_batch or "
            "masks.per_head, or take interop.from_flex(create_block_mask(mask_mod, ...))."
        ) from error


def tile_list(rows: Any, cols: Any, row_blocks: int, col_blocks: int) -> tuple[Tensor, Tensor]:
    """A list of tiles in int64, checked to lie in the matrix."""
    device = next((ids.device for ids in (rows, cols) if isinstance(ids, Tensor)), torch.device("cpu"))
    rows, cols = integer_tensor(rows, "rows", device), integer_tensor(cols, "cols", device)
    if rows.ndim != 1 or rows.shape != cols.shape:
        raise ValueError(f"rows and cols must have one shape [E]; got {list(rows.shape)} and {list(cols.shape)}.")
    for name, ids, stop in (("rows", rows, row_blocks), ("cols", cols, col_blocks)):
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < stop):
            raise ValueError(f"{name} must lie in 0..{stop - 1}; got {int(ids.min())}..{int(ids.max())}.")
    return rows, cols


def _candidate_pairs(
    candidates: Candidates | None, row_blocks: int, col_blocks: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the block rows and columns to look at: a bounded number of block rows at a time, or the list."""
    if isinstance(candidates, tuple):
        yield candidates
        return
    all_cols = torch.arange(col_blocks, device=device)
    for rows in torch.arange(row_blocks, device=device).split(max(1, _PAIRS_AT_ONCE // col_blocks)):
        if candidates is None:
            layout = torch.ones(len(rows), col_blocks, dtype=torch.bool, device=device)
        elif callable(candidates):
            answer = _answer(candidates, "candidates", rows[:, None], all_cols[None, :])
            layout = answer.expand(len(rows), col_blocks)
        else:
            layout = candidates[rows]
        i, j = layout.nonzero(as_tuple=True)
        yield rows[i], j


def _answer(rule: Live, name: str, q: Tensor, k: Tensor) -> Tensor:
    """What a rule says of many pairs at once."""
    try:
        answer = rule(q, k)
    except (RuntimeError, TypeError, ValueError) as error:
        if not any(words in str(error) for words in _ONE_NUMBER):
            raise
        raise TypeError(
            f"{name} must answer for many pairs at once: with &, | and ~ instead of and, or and not, "
            "(0 <= q - k) & (q - k < 64) instead of 0 <= q - k < 64, torch.minimum, torch.maximum and torch.where "
            "instead of min, max and if, functions of torch instead of int, .item() and math, and tensors instead of "
            f"lists that are indexed; got a tensor where Python asks for one number ({error})."
        ) from error
    if answer is None:
        raise TypeError(f"{name} must return bools, True where a score is live; got None: is a `return` missing?")
    return boolean(answer, f"what {name} returns")


def _evaluate(live: Live, rows: Tensor, cols: Tensor, q_len: int, k_len: int, block_q: int, block_k: int) -> Part:
    """The tiles of these candidates that have a live score; partial ones stored once."""
    device = rows.device
    q = rows[:, None, None] * block_q + torch.arange(block_q, device=device)[None, :, None]
    k = cols[:, None, None] * block_k + torch.arange(block_k, device=device)[None, None, :]
    # A predicate that looks something up (a document number, say) must never see a position past the end.
    answer = _answer(live, "live", q.clamp(max=q_len - 1), k.clamp(max=k_len - 1))
    shape = (len(rows), block_q, block_k)
    if answer.ndim > 3 or any(n not in (1, m) for n, m in zip(answer.shape[::-1], shape[::-1], strict=False)):
        raise ValueError(
            f"what live returns must broadcast, as its arguments {list(q.shape)} and {list(k.shape)} do, to "
            f"{list(shape)}; got {list(answer.shape)}."
        )
    inside = answer.expand(shape) & (q < q_len) & (k < k_len)
    words = bitmask.pack(inside)
    full = bitmask.full_word(block_k)
    some, every = (words != 0).any(-1).any(-1), (words == full).all(-1).all(-1)
    distinct, inverse = bitmask.deduplicate(words[some & ~every])
    tile = torch.zeros_like(rows)
    tile[some & ~every] = inverse + 1
    return rows[some], cols[some], tile[some], distinct


def arrays_of(
    q_len: int, k_len: int, block_q: int, block_k: int, parts: list[Part], batch: int, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The canonical `(indptr, indices, tile, bits, pattern)` of one list of tiles a (batch element, head)."""
    row_blocks = -(-q_len // block_q)
    rows, cols, tile, words = [], [], [], []
    offset = 0
    for number, (i, j, t, part_words) in enumerate(parts):
        rows.append(i + number * row_blocks)
        cols.append(j)
        tile.append(torch.where(t > 0, t + offset, t))
        words.append(part_words)
        offset += len(part_words)
    numbers = torch.arange(len(parts), device=words[0].device).view(batch, heads)
    return arrays_of_tiles(
        q_len, k_len, block_q, block_k,
        torch.cat(rows), torch.cat(cols), torch.cat(tile), torch.cat(words), numbers, len(parts),
    )  # fmt: skip


def arrays_of_tiles(
    q_len: int, k_len: int, block_q: int, block_k: int, rows: Tensor, cols: Tensor, tile: Tensor, words: Tensor,
    pattern: Tensor, patterns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The canonical `(indptr, indices, tile, bits, pattern)` of one list with the tiles of all patterns.

    `rows`: int64 `[E]`, pattern * Mq + block row. `words`: shared by the patterns; any of them may be dead, full, equal
    or unused. `pattern`: int64 `[B, H]`, 0 .. patterns - 1, numbered as they first appear; two may turn out equal.
    """
    row_blocks = -(-q_len // block_q)
    indptr, indices, kinds, bits = _assemble(q_len, k_len, block_q, block_k, rows, cols, tile, words, patterns)
    keep, number = distinct_patterns(indptr, indices, kinds, row_blocks)
    if len(keep) < patterns:
        # The first copy of each pattern stays, so the numbers of the partial tiles stay those of first appearance.
        starts = indptr[::row_blocks].tolist()
        counts = indptr.diff().view(patterns, row_blocks)[keep].reshape(-1)
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        indices = torch.cat([indices[starts[p] : starts[p + 1]] for p in keep])
        kinds = torch.cat([kinds[starts[p] : starts[p + 1]] for p in keep])
    return (
        indptr.to(torch.int32), indices.to(torch.int32), kinds.to(torch.int32), bits.contiguous(),
        torch.tensor(number, dtype=torch.int32, device=indices.device)[pattern],
    )  # fmt: skip


def _assemble(
    q_len: int, k_len: int, block_q: int, block_k: int, rows: Tensor, cols: Tensor, tile: Tensor, words: Tensor,
    patterns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Sorted, trimmed at the ends, classified and deduplicated: `(indptr, indices, tile, bits)`, int64 but the bits."""
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    key = rows * col_blocks + cols
    if not bool((key.diff() > 0).all()):
        key, order = torch.sort(key)
        if not bool((key.diff() > 0).all()):
            raise ValueError("a tile must not be listed twice.")
        rows, cols, tile = rows[order], cols[order], tile[order]
    # A tile at an end loses what lies past it. Few (tile, end) pairs differ, so the bits are touched only for those.
    pair = tile * 4
    if q_len % block_q:
        pair += rows % row_blocks == row_blocks - 1
    if k_len % block_k:
        pair += 2 * (cols == col_blocks - 1)
    pairs, which = distinct(pair)
    full = words.new_full((1, block_q, bitmask.words_per_row(block_k)), bitmask.full_word(block_k))
    live_q, live_k = q_len - (row_blocks - 1) * block_q, k_len - (col_blocks - 1) * block_k
    ends = torch.stack(
        [
            bitmask.rectangle(
                block_q, block_k, live_q if end & 1 else block_q, live_k if end & 2 else block_k, words.device
            )
            for end in range(4)
        ]
    )

    def trimmed(some: Tensor) -> Tensor:
        number, end = some // 4, some % 4
        made = full.repeat(len(some), 1, 1)
        made[number > 0] = words.index_select(0, number[number > 0] - 1)
        return made & ends[end]

    kind, bits = bitmask.classify(trimmed, pairs, block_q, block_k)
    tile = kind[which]
    if bool((kind < 0).any()):
        kept = tile >= 0
        rows, cols, tile = rows[kept], cols[kept], tile[kept]
    # Partial tiles are numbered as they first appear in the rows, which makes the arrays of equal masks equal.
    number, first = number_by_first_appearance(tile)
    appearing = tile[first]
    is_partial = appearing > 0
    tile = (is_partial.cumsum(0) * is_partial)[number]
    bits = bits.index_select(0, appearing[is_partial] - 1)
    starts = torch.arange(patterns * row_blocks + 1, device=rows.device)
    return torch.searchsorted(rows, starts), cols, tile, bits


def distinct_patterns(indptr: Tensor, indices: Tensor, tile: Tensor, row_blocks: int) -> tuple[list[int], list[int]]:
    """`(keep, pattern)`: the first pattern of each kind, and for every pattern the number of its kind."""
    patterns = (len(indptr) - 1) // row_blocks
    if patterns == 1:
        return [0], [0]
    counts = indptr.diff().view(patterns, row_blocks).cpu().numpy()
    starts = indptr[::row_blocks].tolist()
    columns, kinds = indices.cpu().numpy(), tile.cpu().numpy()
    number: dict[tuple[bytes, bytes, bytes], int] = {}
    keep: list[int] = []
    pattern: list[int] = []
    for p in range(patterns):
        span = slice(starts[p], starts[p + 1])
        arrays = (counts[p].tobytes(), columns[span].tobytes(), kinds[span].tobytes())
        if arrays not in number:
            number[arrays] = len(keep)
            keep.append(p)
        pattern.append(number[arrays])
    return keep, pattern
