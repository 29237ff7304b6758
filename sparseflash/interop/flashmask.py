"""FlashMask (PaddlePaddle): for every key, one or two intervals of queries that do not see it.

Source: FlashMask (Wang et al., 2024, arXiv 2410.01359), and the function `flashmask_to_densemask` in the documentation
of `paddle.nn.functional.flashmask_attention`, which defines the tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, block_pair, checked_mask, flag, integer, plain_tensor, token_counts
from sparseflash.blockmask.build import SCORES_AT_ONCE, Part
from sparseflash.blockmask.csr import row_of_entry
from sparseflash.blockmask.stats import pattern_count
from sparseflash.blockmask.unique import number_by_first_appearance
from sparseflash.interop.heads import mask_of_patterns

_MOST_RUNS = 3  # the most live runs of a column: between two dead ones and the ends


class FlashMask(NamedTuple):
    """The arguments of `flashmask_attention`, with its names.

    >>> to_flashmask(BlockMask.from_function(lambda q, k: k <= q, 4, block=16)).startend_row_indices.flatten().tolist()
    [4, 4, 4, 4]

    The bounds of key k are query positions, and `[a, b)` excludes b. Causal with 1 bound: `[r0, Nq)` is masked; causal
    with 2: `[r0, r1)`; otherwise with 2: `[r0, Nq)` and `[0, r1)`; with 4: `[r0, r1)` and `[r2, r3)`. Causal masks q <
    k as well.
    """

    startend_row_indices: Tensor  # int32 [B or 1, H or 1, Nk, 1, 2 or 4]
    causal: bool


def to_flashmask(mask: BlockMask, *, causal: bool | None = None, kv_heads: int | None = None) -> FlashMask:
    """The intervals of FlashMask, with as few bounds per key as the mask allows, on the mask's device.

    >>> to_flashmask(BlockMask.from_function(lambda q, k: (k <= q) & (q < k + 2), 4, block=16))
    FlashMask(startend_row_indices=tensor([[[[2],
              [3],
              [4],
              [4]]]], dtype=torch.int32), causal=True)

    For every key at most one run of queries above the diagonal and one below it may be masked; the query on the
    diagonal may belong to either. Causal, windowed, document, prefix and causal sink masks qualify; a butterfly does
    not. Time is proportional to the live tiles.

    `causal`: by default True if the mask has as many queries as keys and no live score above the diagonal. FlashMask
    numbers queries from the top in both forms. `kv_heads`: the number of key-value heads, if FlashMask needs one mask
    for each of them; the query heads of a group must then agree.

    Raises ValueError, naming the first key, if the mask cannot be represented.
    """
    mask = checked_mask(mask).bake_lengths()
    pattern = _of_kv_heads(mask.pattern, kv_heads)
    if causal and mask.q_len != mask.k_len:
        raise ValueError(
            f"causal must be False for {mask.q_len} queries and {mask.k_len} keys: FlashMask's releases align the "
            "causal diagonal of such masks differently; got True."
        )
    patterns = pattern_count(mask)
    runs = [_dead_runs(mask, p) for p in range(patterns)]
    if causal is None:
        # The first run of dead queries must reach the diagonal.
        keys = torch.arange(mask.k_len, device=mask.device)
        causal = mask.q_len == mask.k_len and all(bool((stop[:, 0] >= keys[: len(stop)]).all()) for _, stop, _ in runs)
    places = [(mask.pattern == p).nonzero()[0].tolist() for p in range(patterns)]
    bounds = torch.stack(  # [P, Nk, 4]
        [
            _bounds(mask, runs[p], causal, f"head {head} of batch element {batch}")
            for p, (batch, head) in enumerate(places)
        ]
    )
    lower_open = bool((bounds[..., 1] == mask.q_len).all())
    upper_open = bool((bounds[..., 2] == 0).all())
    if causal:
        columns = [0] if lower_open else [0, 1]
    else:
        columns = [0, 3] if lower_open and upper_open else [0, 1, 2, 3]
    indices = bounds[..., columns].to(torch.int32)[pattern.long()]
    return FlashMask(indices.contiguous(), causal)


def from_flashmask(
    startend_row_indices: Tensor,
    *,
    causal: bool,
    q_len: int | None = None,
    heads: int | None = None,
    block: Block = 128,
) -> BlockMask:
    """The mask of FlashMask's intervals: `from_flashmask(indices, causal=causal)`. Every FlashMask can be represented.

    >>> indices = torch.tensor([2, 2, 4, 4]).view(1, 1, 4, 1)  # two documents of two tokens
    >>> from_flashmask(indices, causal=True, block=16).to_dense()[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]

    `startend_row_indices`: int `[B, H, Nk, 1 or 2]` for causal, `[B, H, Nk, 2 or 4]` otherwise, see `FlashMask`; bounds
    past the last query mean the end. `q_len` in tokens, by default Nk. `heads`: the number of query heads, which share
    the H given ones in groups; by default H. `block` in tokens.

    Time is proportional to the tiles that an interval's end may cut, plus `Mq * Mk`.

    Raises ValueError for another shape, negative bounds, or a causal mask with `q_len` other than Nk.
    """
    plain_tensor(startend_row_indices, "startend_row_indices")
    causal = flag(causal, "causal")
    widths = (1, 2) if causal else (2, 4)
    shape = list(startend_row_indices.shape)
    if len(shape) != 4 or shape[3] not in widths or 0 in shape:
        raise ValueError(
            f"startend_row_indices must have shape [B, H, Nk, {widths[0]} or {widths[1]}] with causal={causal}; "
            f"got {shape}."
        )
    if startend_row_indices.is_floating_point() or startend_row_indices.dtype == torch.bool:
        raise TypeError(f"startend_row_indices must be an integer tensor; got {startend_row_indices.dtype}.")
    batch, given, k_len, _ = shape
    q_len, k_len = token_counts(k_len if q_len is None else q_len, k_len)
    if causal and q_len != k_len:
        raise ValueError(f"q_len must be {k_len}, the number of keys, for a causal FlashMask; got {q_len}.")
    heads = given if heads is None else integer(heads, "heads", "heads")
    if heads < 1 or heads % given:
        raise ValueError(f"heads must be a multiple of the {given} that startend_row_indices has; got {heads}.")
    if int(startend_row_indices.min()) < 0:
        raise ValueError(f"startend_row_indices must not be negative; got {int(startend_row_indices.min())}.")
    block_q, block_k = block_pair(block)
    flat = startend_row_indices.long().clamp(max=q_len).reshape(batch * given, -1)
    _, number = torch.unique(flat, dim=0, return_inverse=True)
    number, first = number_by_first_appearance(number)
    parts = [
        _part(_intervals(flat[f].view(k_len, -1), causal, q_len), q_len, k_len, block_q, block_k)
        for f in first.tolist()
    ]
    number = number.view(batch, given).repeat_interleave(heads // given, dim=1)
    return mask_of_patterns(q_len, k_len, block_q, block_k, parts, number)


# to FlashMask


def _of_kv_heads(pattern: Tensor, kv_heads: int | None) -> Tensor:
    """The pattern of each key-value head: int `[B or 1, kv_heads or 1]`."""
    heads = pattern.shape[1]
    if kv_heads is None or heads == 1:
        return pattern
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"kv_heads must divide the mask's {heads} heads; got {kv_heads}.")
    groups = pattern.view(len(pattern), kv_heads, -1)
    if not bool((groups == groups[..., :1]).all()):
        group = int((groups != groups[..., :1]).any(-1).any(0).nonzero()[0])
        size = heads // kv_heads
        raise ValueError(
            f"the query heads of a key-value head must have one mask; got different ones among heads "
            f"{group * size}..{(group + 1) * size - 1}."
        )
    return groups[..., 0]


def _dead_runs(mask: BlockMask, p: int) -> tuple[Tensor, Tensor, int]:
    """The runs of dead queries of each key of one pattern, `(start, stop, most)`.

    start, stop: int64 `[most, _MOST_RUNS + 1]`, in order, some of them empty. most: the first key that has more runs,
    or Nk.
    """
    col_blocks, device = mask.blocks[1], mask.device
    indptr, indices, tile = mask.columns
    indptr = indptr[p * col_blocks : (p + 1) * col_blocks + 1].long()
    span = slice(int(indptr[0]), int(indptr[-1]))
    rows, tile = indices[span].long(), tile[span].long()
    cols = row_of_entry(indptr - indptr[0], len(rows))
    words = bitmask.choices(mask.bits, mask.block_k)  # [T + 2, block_q, W]
    # A score begins a live run if the one above it is dead, and ends one if the one below is. Inside a tile that
    # depends only on the tile; its first and last row depend on the tiles that touch it.
    joined = (cols.diff() == 0) & (rows.diff() == 1)
    none = torch.zeros_like(words[tile[:1], 0])
    first, last = words[tile, 0], words[tile, -1]
    above = torch.cat([none, torch.where(joined[:, None], last[:-1], 0)])[: len(rows)]
    below = torch.cat([torch.where(joined[:, None], first[1:], 0), none])[: len(rows)]
    begins = torch.cat([torch.zeros_like(words[:, :1]), words[:, 1:] & ~words[:, :-1]], dim=1)
    ends = torch.cat([words[:, :-1] & ~words[:, 1:], torch.zeros_like(words[:, :1])], dim=1)
    begins_at_edge, ends_at_edge = first & ~above, last & ~below

    most = mask.k_len
    counts = torch.zeros(col_blocks, mask.block_k, dtype=torch.int64, device=device)
    inner = bitmask.unpack(begins, mask.block_k).sum(1)  # [T + 2, block_k]
    some = inner.any(-1)[tile] | (begins_at_edge != 0).any(-1)
    for e in some.nonzero()[:, 0].split(max(1, SCORES_AT_ONCE // mask.block_k)):
        counts.index_add_(0, cols[e], inner[tile[e]] + bitmask.unpack(begins_at_edge[e], mask.block_k))
    many = (counts.view(-1)[: mask.k_len] > _MOST_RUNS).nonzero()
    if len(many):
        most = int(many[0])

    start = torch.full((most, _MOST_RUNS + 1), mask.q_len, dtype=torch.int64, device=device)
    stop = start.clone()
    start[:, 0] = 0  # dead runs begin at the top and where live ones end, and end where live ones begin
    for inside, edge, edge_row, table, shift in (
        (begins, begins_at_edge, 0, stop, 0),
        (ends, ends_at_edge, mask.block_q - 1, start, 1),
    ):
        q, k = _places(inside, edge, edge_row, rows, cols, tile, most, mask)
        k, order = _sorted(k, q)
        place = torch.arange(len(k), device=device) - torch.searchsorted(k, k)
        table[k, place + shift] = q[order] + shift
    return start, stop, most


def _sorted(k: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The keys sorted, and the permutation that sorts them, with the queries of each key ascending."""
    by_query = torch.argsort(q)
    keys, by_key = torch.sort(k[by_query], stable=True)
    return keys, by_query[by_key]


def _places(
    inside: Tensor, edge: Tensor, edge_row: int, rows: Tensor, cols: Tensor, tile: Tensor, stop: int, mask: BlockMask
) -> tuple[Tensor, Tensor]:
    """The query and key of the set bits of all tiles, before key `stop`.

    inside: the bits inside a tile, which are the same wherever it occurs, `[T + 2, block_q, W]`; edge: the bits of each
    entry in row `edge_row`, `[E, W]`.
    """
    t, q, k = bitmask.unpack(inside, mask.block_k).nonzero(as_tuple=True)
    count = torch.bincount(t, minlength=len(inside))
    before = count.cumsum(0) - count
    entry = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), count[tile])
    nth = torch.arange(len(entry), device=rows.device) - (count[tile].cumsum(0) - count[tile])[entry]
    bit = before[tile[entry]] + nth
    on_edge = (edge != 0).any(-1).nonzero()[:, 0]
    which, edge_k = bitmask.unpack(edge[on_edge], mask.block_k).nonzero(as_tuple=True)
    entry, q, k = (
        torch.cat([entry, on_edge[which]]),
        torch.cat([q[bit], torch.full_like(edge_k, edge_row)]),
        torch.cat([k[bit], edge_k]),
    )
    q, k = rows[entry] * mask.block_q + q, cols[entry] * mask.block_k + k
    return q[k < stop], k[k < stop]


def _bounds(mask: BlockMask, runs: tuple[Tensor, Tensor, int], causal: bool, place: str) -> Tensor:
    """The masked ranges `[r0, r1)` below the diagonal and `[r2, r3)` above it: int64 `[Nk, 4]`.

    Empty ranges are `[Nq, Nq)` and `[0, 0)`.
    """
    start, stop, most = runs
    q_len, device = mask.q_len, start.device
    key = torch.arange(most, device=device)
    diagonal = key.clamp(max=q_len)
    if causal:
        fits = stop[:, 0] >= key  # no live query above the diagonal
        start = torch.maximum(start, key[:, None])
    # Move the non-empty runs to the front.
    order = torch.argsort((stop <= start).to(torch.int8), dim=1, stable=True)
    runs_a_key = (stop > start).sum(1)
    empty = runs_a_key[:, None] <= torch.arange(2, device=device)
    first, second = start.gather(1, order[:, :2]).masked_fill(empty, q_len).unbind(1)
    first_stop, second_stop = stop.gather(1, order[:, :2]).masked_fill(empty, q_len).unbind(1)
    zero = torch.zeros_like(key)
    if causal:
        fits &= runs_a_key <= 1
        bounds = torch.stack([first, first_stop, zero, zero], dim=1)
    else:
        two = runs_a_key == 2
        fits = (runs_a_key < 2) | (two & (first_stop <= diagonal + 1) & (second >= diagonal))
        # A single run lies below the diagonal, above it, or is split by it.
        above = two | (first_stop <= diagonal + 1)
        below = ~two & (first >= diagonal)
        lower = torch.where(above, second, torch.maximum(first, diagonal)).where(~below, first)
        lower_stop = torch.where(above, second_stop, first_stop).where(~below, first_stop)
        upper = first.where(~below, zero)
        upper_stop = torch.where(above, first_stop, diagonal).where(~below, zero)
        bounds = torch.stack([lower, lower_stop, upper, upper_stop], dim=1)
    bad = (~fits).nonzero()
    if len(bad) or most < mask.k_len:
        k = int(bad[0]) if len(bad) else most
        found = f"more than {_MOST_RUNS - 1}"
        if len(bad):
            found = ", ".join(f"{a}..{b - 1}" for a, b in zip(runs[0][k].tolist(), runs[1][k].tolist()) if b > a)
            found = found or "none"
        raise ValueError(
            "FlashMask must have at most one run of masked queries below the diagonal and "
            f"{'all masked' if causal else 'one'} above it for every key; got {found} for key {k} of {place}."
        )
    return bounds


# from FlashMask


def _intervals(bounds: Tensor, causal: bool, q_len: int) -> list[tuple[Tensor, Tensor]]:
    """The intervals of masked queries, `[start, stop)`, int64 `[Nk]` each; `bounds` int64 `[Nk, 1, 2 or 4]`."""
    zero = torch.zeros_like(bounds[:, 0])
    with_ends = bounds.shape[1] == (2 if causal else 4)
    found = [(bounds[:, 0], bounds[:, 1] if with_ends else zero + q_len)]
    if causal:
        found.append((zero, torch.arange(len(bounds), device=bounds.device)))
    else:
        found.append((bounds[:, 2], bounds[:, 3]) if with_ends else (zero, bounds[:, 1]))
    return found


def _part(intervals: list[tuple[Tensor, Tensor]], q_len: int, k_len: int, block_q: int, block_k: int) -> Part:
    """The tiles of one pattern."""
    device = intervals[0][0].device
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    top = torch.arange(row_blocks, device=device)[:, None] * block_q
    bottom = (top + block_q).clamp(max=q_len)
    keys = torch.arange(col_blocks * block_k, device=device).clamp(max=k_len - 1).view(col_blocks, block_k)
    dead = torch.zeros(row_blocks, col_blocks, dtype=torch.bool, device=device)
    cut = dead.clone()
    for start, stop in intervals:
        start, stop = start[keys], stop[keys]
        dead |= (start.amax(1) <= top) & (stop.amin(1) >= bottom)
        some = stop > start
        cut |= (start.masked_fill(~some, q_len).amin(1) < bottom) & (stop.masked_fill(~some, 0).amax(1) > top)

    at_ends = (cut & ~dead).nonzero()
    rows, cols, tile, words = _cut_tiles(intervals, at_ends[:, 0], at_ends[:, 1], keys, block_q)
    i, j = (~cut & ~dead).nonzero(as_tuple=True)
    return torch.cat([rows, i]), torch.cat([cols, j]), torch.cat([tile, torch.zeros_like(i)]), words


def _cut_tiles(intervals: list[tuple[Tensor, Tensor]], rows: Tensor, cols: Tensor, keys: Tensor, block_q: int) -> Part:
    """The tiles at the given rows and columns, int64 `[E]`.

    `keys` int64 `[Mk, block_k]`: the keys of each block column. Tiles with equal bounds relative to their first row are
    evaluated once.
    """
    block_k, device = keys.shape[1], rows.device
    no_words = torch.zeros(0, block_q, bitmask.words_per_row(block_k), dtype=torch.int32, device=device)
    kinds, found, offset = [rows[:0]], [no_words], 0
    query = torch.arange(block_q, device=device)[:, None]
    for e in torch.arange(len(rows), device=device).split(max(1, SCORES_AT_ONCE // (2 * len(intervals) * block_k))):
        k, top = keys[cols[e]], rows[e][:, None] * block_q
        bounds = []
        for start, stop in intervals:
            first, last = (start[k] - top).clamp(0, block_q), (stop[k] - top).clamp(0, block_q)
            bounds += [first.where(first < last, 0), last.where(first < last, 0)]
        distinct, inverse = bitmask.deduplicate(torch.stack(bounds, dim=1).to(torch.int32))  # [T, 2 n, block_k]
        for some in distinct.split(max(1, SCORES_AT_ONCE // (block_q * block_k))):
            first, last = some[:, 0::2, None], some[:, 1::2, None]
            found.append(bitmask.pack(((query < first) | (query >= last)).all(1)))
        kinds.append(inverse + 1 + offset)
        offset += len(distinct)
    return rows, cols, torch.cat(kinds), torch.cat(found)
