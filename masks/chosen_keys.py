"""Keys chosen by each query for itself: an element mask from the numbers of the keys, or of runs of keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, block_pair, flag, token_counts
from sparseflash.blockmask.by_name import by_name
from sparseflash.masks import fused
from sparseflash.masks.tiling.arguments import at_least, head_count
from sparseflash.masks.tiling.chosen import Frame, Kept, as_heads, compact, dynamic_mask, frame, full_words, kind_of

_AT_ONCE = 1 << 24  # chosen words, or scores, that are processed together


@by_name
@torch.no_grad()
def selected_keys(
    indices: Tensor, *, k_len: int, block: Block = 128, span: int = 1, causal: bool = False, most: int | None = None,
    group: int = 1,
) -> BlockMask:  # fmt: skip
    """Every query sees the keys whose indices are given for it.

    >>> mask = selected_keys(torch.tensor([[0, 2], [1, -1], [2, 0], [3, 3]]), k_len=4, block=16)
    >>> mask.to_dense()[0, 0].int().tolist()
    [[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]

    Score (q, t) of head h is live iff

        t // span is in indices[b, h, q]   (and, if causal, t <= q + k_len - q_len)

    Args:
        indices: int `[Nq, K]`, `[H, Nq, K]` or `[B, H, Nq, K]`, in any order, with or without repetitions. An index of
            no key, such as -1, is ignored: use it as padding. No gradient flows through the choice.
        k_len: tokens.
        span: the number of keys that one index stands for, a power of two; 1 for single keys, 64 for NSA's selected
            blocks, the chunk size for MoBA.
        causal: no query sees a key after it.
        group: the number of query heads that share the choice of one head of `indices`.
        most: the most tiles of a block row; see below.
        block: tokens per side of a tile.

    NSA's `topk_idx [Hkv, Nq, k]` has this form, with `span=64, causal=True, group=Hq // Hkv`; a list of tokens
    `[Nq, Hkv, k]`, as in MagiAttention, has it after `transpose(0, 1)`. For one list for each block of queries use
    `BlockMask.from_block_index`.

    **The kernel still walks tiles**: a tile with one live score costs as much as a full one. Per-query choices save
    time only where neighbouring queries agree, or choose runs that fall into few tiles: compare `mask.density` with the
    share of live tiles, which `repr(mask)` shows. For lists that a group of 16 heads shares,
    `grouped.selected_attention` reads only the chosen blocks.

    The mask is dynamic, and the host does not wait for the device. So memory is reserved for the largest possible
    number of tiles: a block row has at most `min(Mk, K * block_q)` of them, of `block_q * block_k / 8` bytes each.
    `most` bounds the tiles of a row, and so memory and work; a row with more **loses** the tiles with the fewest chosen
    keys (of equals, the later ones). Working memory is bounded, too: choices are packed about 16 million at a time.

    Source: DeepSeek-V3.2's sparse attention (2025; K = 2048 keys a query), NSA (Yuan et al., 2025, section 3.3.2), MoBA
    (Lu et al., 2025, section 2.2).

    Raises ValueError if `span` is no power of two or `most` is less than 1.
    """
    indices = as_heads("indices", indices, "Nq, K", floating=False)
    of = _checked(indices.shape[2], k_len, block, causal, indices.device)
    return _selected(indices, of, _span(span, of.k_len), most, group, distinct=False)


@by_name
@torch.no_grad()
def top_k_keys(
    scores: Tensor, *, k: int, k_len: int, block: Block = 128, span: int = 1, causal: bool = False,
    most: int | None = None, group: int = 1,
) -> BlockMask:  # fmt: skip
    """Every query sees the k keys, or the k runs of `span` keys, with its highest scores.

    >>> q, k = torch.randn(2, 256, 16), torch.randn(2, 256, 16)
    >>> runs = k.unflatten(1, (-1, 32)).mean(2)  # MoBA: the means of chunks of 32 keys
    >>> mask = top_k_keys(q @ runs.transpose(1, 2), k=2, k_len=256, block=64, span=32)
    >>> mask.density
    0.25

    Score (q, t) of head h is live iff

        scores[b, h, q, t // span] is among the k highest of row q   (and, if causal, t <= q + k_len - q_len)

    where, if causal, only runs that begin at or before the query are candidates. A query with fewer than k keeps them
    all. Of equal scores the first wins; -inf and NaN are never chosen. Set a score to +inf to force a choice, such as
    the query's own run in MoBA.

    Args:
        scores: floating `[Nq, R]`, `[H, Nq, R]` or `[B, H, Nq, R]`, with `R = ceil(k_len / span)`.
        k: keys, or runs of keys, of a query.
        k_len, span, causal, group, most, block: as for `selected_keys`, whose docstring describes the cost of such
            masks.

    With `span=1` the scores are `Nq x Nk` numbers, and sorting those may take longer than dense attention: if something
    cheaper has already chosen, pass its choice to `selected_keys`.

    MoBA's gates are scores of this form, with its chunk size as `span`. From gates that are bools, the first k open
    ones of a query are kept:

    >>> gates = torch.tensor([[True, False], [True, True]]).repeat_interleave(32, 0)  # [Nq, R]
    >>> scores = torch.zeros(64, 2).masked_fill(~gates, -torch.inf)
    >>> top_k_keys(scores, k=2, k_len=64, block=32, span=32, causal=True).to_layout()[0, 0].int().tolist()
    [[1, 0], [1, 1]]

    Raises ValueError if the scores do not have R columns or k is less than 1.
    """
    scores = as_heads("scores", scores, "Nq, R", floating=True)
    k = at_least(1, k, "k", "keys")
    q_len, runs = scores.shape[2:]
    of = _checked(q_len, k_len, block, causal, scores.device)
    span = _span(span, of.k_len)
    if runs != -(-of.k_len // span):
        raise ValueError(
            f"scores must have {-(-of.k_len // span)} columns for {of.k_len} keys in runs of {span}; got {runs}."
        )
    chosen = []
    starts = torch.arange(runs, device=scores.device) * span
    last_key = torch.arange(q_len, device=scores.device)[:, None] + (of.k_len - q_len)
    rows_at_once = max(1, _AT_ONCE // (scores.shape[0] * scores.shape[1] * runs))
    for some, last in zip(scores.split(rows_at_once, 2), last_key.split(rows_at_once), strict=True):
        usable = some > -torch.inf
        if causal:
            usable &= starts <= last
        order = some.masked_fill(~usable, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[..., :k]
        chosen.append(order.masked_fill_(~usable.gather(-1, order), -1))
    return _selected(torch.cat(chosen, 2), of, span, most, group, distinct=True)


def _checked(q_len: int, k_len: int, block: Block, causal: bool, device: torch.device) -> Frame:
    pair = block_pair(block)
    q_len, k_len = token_counts(q_len, k_len)
    return frame(q_len, k_len, pair, flag(causal, "causal"), 0, 0, device)


def _span(span: int, k_len: int) -> int:
    span = at_least(1, span, "span", "keys")
    if span & (span - 1):
        raise ValueError(f"span must be a power of two; got {span}.")
    return min(span, 1 << (k_len - 1).bit_length())


def _selected(indices: Tensor, of: Frame, span: int, most: int | None, group: int, *, distinct: bool) -> BlockMask:
    """The mask of `indices [B, H, Nq, K]`; `distinct` promises that a query names no key twice."""
    group = head_count(group, "group", "query heads")
    batch, heads, _, choices = indices.shape
    (rows, cols), (block_q, block_k) = of.open.shape, of.block
    patterns = batch * heads
    most = min(cols if most is None else at_least(1, most, "most", "tiles"), cols)
    width = bitmask.words_per_row(block_k)
    table = patterns * rows * block_q * cols * block_k // span
    if most == cols and min(block_k, bitmask.WORD) <= span <= block_k and table <= _AT_ONCE:
        if fused.serves(indices, rows, cols):
            from sparseflash.masks.fused.runs import tiles_of_runs  # imports Triton

            room = patterns * of.rooms[min(cols, choices * block_q)]
            return dynamic_mask(of, *tiles_of_runs(indices, of, span, room), (batch, heads), group)
        return _selected_by_table(indices, of, span, group)

    if not distinct:
        indices = _without_repetitions(indices)

    def words() -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        return _words(indices, of, span)

    once = list(words()) if indices.numel() * max(1, span // min(block_k, bitmask.WORD)) <= _AT_ONCE else None
    named = indices.new_zeros(patterns * rows * cols, dtype=torch.int32)  # vmap maps it if it maps the indices
    for tile, _, value in once or words():
        named.scatter_add_(0, tile, (value != 0).to(torch.int32))
    named = named.view(batch, heads, rows, cols)
    kept = named > 0
    if most < cols:
        best = named.sort(dim=-1, descending=True, stable=True).indices[..., :most]
        kept &= torch.zeros_like(kept).scatter_(-1, best, True)
    kept_flat = kept.view(-1)

    room = patterns * of.rooms[min(most, choices * block_q * max(1, span // block_k))]
    found = compact(kept, room)
    bits = indices.new_zeros(room * block_q * width, dtype=torch.int32)
    for tile, word, value in once or words():
        # The bits are distinct, so adding them never carries and the sum is their union. Keys that are not kept add 0.
        value = value * kept_flat[tile]
        bits.scatter_add_(0, (found.running[tile] - 1).clamp_(min=0) * (block_q * width) + word, value)
    bits = bits.view(room, block_q, width)
    return _with_full_tiles(of, found, bits, (batch, heads), group)


def _selected_by_table(indices: Tensor, of: Frame, span: int, group: int) -> BlockMask:
    """The same as `_selected` in a third of the steps, for runs of whole words with few enough bools."""
    batch, heads, q_len, choices = indices.shape
    (rows, cols), (block_q, block_k) = of.open.shape, of.block
    runs, runs_in_tile = -(-of.k_len // span), block_k // span
    # One column before and one after for indices of no key.
    last = cols * runs_in_tile
    column = indices.to(torch.int64)  # a narrow type may be too small for the bounds
    column = column.masked_fill(column >= runs, last).clamp_(min=-1) + 1
    table = indices.new_zeros(batch, heads, rows * block_q, last + 2, dtype=torch.bool)
    table[:, :, :q_len].scatter_(-1, column, True)
    live = table[..., 1:-1]
    if of.causal:  # a run that has begun has a live key; one that has not begun has none
        last_key = torch.arange(of.k_len - q_len, of.k_len - q_len + rows * block_q, device=indices.device)
        live = live & (torch.arange(0, cols * block_k, span, device=indices.device) <= last_key[:, None])
    live = live.unflatten(3, (cols, runs_in_tile)).unflatten(2, (rows, block_q))  # [B, H, Mq, block_q, Mk, ...]

    kept = live.any(5).any(3)
    found = compact(kept, batch * heads * of.rooms[min(cols, choices * block_q)])
    row = torch.div(found.place, cols, rounding_mode="floor")
    chosen = live.flatten(0, 2).transpose(1, 2)[row, found.indices]  # [room, block_q, runs_in_tile]
    most_bits = full_words(of)[kind_of(of, found)].unflatten(2, (runs_in_tile, -1))
    bits = torch.where(chosen.unsqueeze(3), most_bits, 0).flatten(2)
    return _with_full_tiles(of, found, bits, (batch, heads), group)


def _with_full_tiles(of: Frame, found: Kept, bits: Tensor, heads: tuple[int, int], group: int) -> BlockMask:
    """Where neighbouring queries agree a tile is full, and kernels do not read its bits."""
    full = (bits == bitmask.full_word(of.block[1])).flatten(1).all(1)
    number = torch.arange(1, len(bits) + 1, dtype=torch.int32, device=bits.device)
    return dynamic_mask(of, found.indptr, found.indices, number.masked_fill(full, 0), bits, heads, group)


def _without_repetitions(indices: Tensor) -> Tensor:
    """The indices of each query in ascending order, with -1 in place of repetitions."""
    if not indices.dtype.is_signed:  # it has no -1
        indices = indices.to(torch.int64)
    indices = indices.sort(-1).values
    again = torch.nn.functional.pad(indices[..., 1:] == indices[..., :-1], (1, 0))
    return indices.masked_fill(again, -1)


def _words(indices: Tensor, of: Frame, span: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The chosen words, a bounded number at a time: `(tile, word, value)`, flat.

    `tile`: its number in `[B, H, Mq, Mk]`, int64; `word`: the number of the word in the tile, int64; `value`: its bits,
    int32, 0 where nothing is live.
    """
    batch, heads, q_len, choices = indices.shape
    (rows, cols), (block_q, block_k) = of.open.shape, of.block
    device = indices.device
    in_word, width = min(block_k, bitmask.WORD), bitmask.words_per_row(block_k)
    runs, words_in_run = -(-of.k_len // span), max(1, span // in_word)
    pattern = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    step = torch.arange(words_in_run, device=device)
    kinds = full_words(of).view(-1)
    queries_at_once = max(1, _AT_ONCE // (batch * heads * choices * words_in_run))
    every_q = torch.arange(q_len, device=device)[:, None]
    for some, q in zip(indices.split(queries_at_once, 2), every_q.split(queries_at_once), strict=True):
        some = some.to(torch.int64)
        exists = (some >= 0) & (some < runs)
        start = some.masked_fill(~exists, 0) * span
        if span >= in_word:
            value = exists.to(torch.int32) * bitmask.full_word(block_k)
        else:
            value = (exists.to(torch.int32) * ((1 << span) - 1)) << (start % in_word).to(torch.int32)
        word = (start // in_word).unsqueeze(-1) + step  # [B, H, some, K, words_in_run], of the row of all keys
        value = value.unsqueeze(-1).expand(word.shape)
        col = word // width
        # The last run may go past the last tile.
        value = value.masked_fill(col >= cols, 0)
        place = (q // block_q).unsqueeze(-1) * cols + col.clamp_(max=cols - 1)
        word = (q % block_q).unsqueeze(-1) * width + word % width
        value = value & kinds[of.kind[place].long() * (block_q * width) + word]
        value = value.masked_fill_(~of.open.view(-1)[place], 0)
        tile = pattern.unsqueeze(-1) * (rows * cols) + place
        yield tile.reshape(-1), word.reshape(-1), value.reshape(-1)
