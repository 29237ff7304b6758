"""FlashMask (PaddlePaddle): for every key, one or two intervals of queries that do not see it.

Source: FlashMask (Wang et al., 2024, arXiv 2410.01359), and the function `flashmask_to_densemask` in the documentation
of `paddle.nn.functional.flashmask_attention`, which defines the tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import (
    Block,
    block_pair,
    checked_integers,
    checked_mask,
    flag,
    integer,
    plain_tensor,
    token_counts,
)
from sparseflash.blockmask.stats import pattern_count
from sparseflash.blockmask.unique import number_by_first_appearance
from sparseflash.interop.dead_runs import MOST_RUNS, dead_runs
from sparseflash.interop.interval_tiles import tiles_outside


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

    Args:
        causal: the form of the result; by default True if the mask has as many queries as keys and no live score above
            the diagonal. FlashMask numbers queries from the top in both forms.
        kv_heads: the number of key-value heads, if FlashMask needs one mask for each of them; the query heads of a
            group must then agree. Raises ValueError, naming the first key, if the mask cannot be represented.
    """
    mask = checked_mask(mask).bake_lengths()
    causal = None if causal is None else flag(causal, "causal")
    pattern = _of_kv_heads(mask.pattern, kv_heads)
    if causal and mask.q_len != mask.k_len:
        raise ValueError(
            f"causal must be False for {mask.q_len} queries and {mask.k_len} keys: FlashMask's releases align the "
            "causal diagonal of such masks differently; got True."
        )
    patterns = pattern_count(mask)
    runs = [dead_runs(mask, p) for p in range(patterns)]
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

    Args:
        startend_row_indices: int `[B, H, Nk, 1 or 2]` for causal, `[B, H, Nk, 2 or 4]` otherwise, see `FlashMask`;
            bounds past the last query mean the end.
        causal: the form of the indices.
        q_len: tokens, by default Nk.
        heads: the number of query heads, which share the H given ones in groups; by default H.
        block: tokens per side of a tile.

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
    checked_integers(startend_row_indices, "startend_row_indices")
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
        tiles_outside(_intervals(flat[f].view(k_len, -1), causal, q_len), q_len, k_len, block_q, block_k)
        for f in first.tolist()
    ]
    number = number.view(batch, given).repeat_interleave(heads // given, dim=1)
    return BlockMask._of(q_len, k_len, block_q, block_k, parts, number)


def _of_kv_heads(pattern: Tensor, kv_heads: int | None) -> Tensor:
    """The pattern of each key-value head: int `[B or 1, kv_heads or 1]`."""
    heads = pattern.shape[1]
    if kv_heads is None:
        return pattern
    if integer(kv_heads, "kv_heads", "") < 1 or (heads > 1 and heads % kv_heads):
        raise ValueError(f"kv_heads must divide the mask's {heads} heads; got {kv_heads}.")
    if heads == 1:
        return pattern
    groups = pattern.view(len(pattern), kv_heads, -1)
    if not bool((groups == groups[..., :1]).all()):
        group = int((groups != groups[..., :1]).any(-1).any(0).nonzero()[0])
        size = heads // kv_heads
        raise ValueError(
            f"the query heads of a key-value head must have one mask; got different ones among heads "
            f"{group * size}..{(group + 1) * size - 1}."
        )
    return groups[..., 0]


def _bounds(mask: BlockMask, runs: tuple[Tensor, Tensor, int], causal: bool, place: str) -> Tensor:
    """The masked ranges `[r0, r1)` below the diagonal and `[r2, r3)` above it: int64 `[Nk, 4]`.

    Empty ranges are `[Nq, Nq)` and `[0, 0)`.
    """
    start, stop, most = runs
    q_len, device = mask.q_len, start.device
    key = torch.arange(most, device=device)
    diagonal = key.clamp(max=q_len)
    if causal:
        fits = stop[:, 0] >= key
        start = torch.maximum(start, key[:, None])
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
        found = f"more than {MOST_RUNS - 1}"
        if len(bad):
            found = ", ".join(f"{a}..{b - 1}" for a, b in zip(runs[0][k].tolist(), runs[1][k].tolist()) if b > a)
            found = found or "none"
        raise ValueError(
            "FlashMask must have at most one run of masked queries below the diagonal and "
            f"{'all masked' if causal else 'one'} above it for every key; got {found} for key {k} of {place}."
        )
    return bounds


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
