"""Attention to chosen blocks of keys, with the query heads of a group as rows of one tile."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from sparseflash.attention import Backend, attention, in_one_dtype
from sparseflash.backends import chosen_blocks
from sparseflash.blockmask.arguments import BLOCKS, flag, integer, integer_tensor
from sparseflash.merge import with_sink
from sparseflash.remedies import refuse, without_others
from sparseflash.scores.change import Change, Scores, Sizes, scores_of
from sparseflash.scores.rows import in_rows
from sparseflash.validation import check_tensors, checked_lists, checked_scale


@overload
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, *, span: int = 64, causal: bool = True, cu_seqlens: Any = None,
    scale: float | None = None, return_lse: Literal[False] = False, dropout_p: float = 0.0,
    seed: int | Tensor | None = None, scores: Scores | Change | None = None, backend: Backend | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, *, span: int = 64, causal: bool = True, cu_seqlens: Any = None,
    scale: float | None = None, return_lse: Literal[True], dropout_p: float = 0.0,
    seed: int | Tensor | None = None, scores: Scores | Change | None = None, backend: Backend | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, *, span: int = 64, causal: bool = True, cu_seqlens: Any = None,
    scale: float | None = None, return_lse: bool = False, dropout_p: float = 0.0,
    seed: int | Tensor | None = None, scores: Scores | Change | None = None, backend: Backend | None = None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Exact attention in which every query has a list of blocks of keys, shared by the heads of its group (NSA).

    >>> q, k, v = torch.randn(1, 32, 200, 64), torch.randn(1, 2, 200, 64), torch.randn(1, 2, 200, 64)
    >>> own = torch.arange(200) // 64
    >>> index = torch.stack([own, own - 1, own * 0], -1).expand(2, 200, 3)  # its own block, the one before, the first
    >>> selected_attention(q, k, v, index).shape
    torch.Size([1, 32, 200, 64])

    Query p of head h sees key t iff

        t // span is in index[b, h // group, p]   (and, if causal, t <= p + Nk - Nq)

    Args:
        q, k, v: `[B, Hq, Nq, D]`, `[B, Hkv, Nk, D]` and `[B, Hkv, Nk, Dv]`, as for `attention`; `group = Hq // Hkv`.
        index: integers `[Hkv, Nq, K]` or `[B, Hkv, Nq, K]`, in any order, with or without repetitions. A number of no
            block, such as -1, is ignored; K may be 0.
        span: tokens of a block, a power of two from 16 to 256.
        scale, return_lse, backend: as for `attention`.
        dropout_p, seed: as for `attention`; other weights are dropped than by `attention` with the same seed.
        scores: score modifications, but tile_bias, and a key_bias only if the heads of a group share it. Its
            positions are places in q and k, also with `cu_seqlens`.
        cu_seqlens: the running sums of the lengths of sequences that lie one behind the other, from 0 to `Nq = Nk`,
            integers `[S + 1]`. Blocks and `causal` then count within a sequence: each begins with block 0, and a
            query sees keys of its own sequence only. Sequences may begin anywhere.

    The live scores are the same as under `masks.selected_keys(index, k_len=Nk, span=span, group=group)`, whose tiles
    also hold blocks that only a neighbour has chosen. A tile of the kernels holds one query of a whole group, and reads
    only the blocks that this query has chosen; with fewer than 8 heads in a group (16 above blocks of 64), and for the
    gradients of keys, it holds the queries that have chosen a block. In fp32, with `scores`, `dropout_p` or
    `cu_seqlens`, and at head dims above 192, the heads of a group are rows of a mask's tiles, padded with zeros to 16.
    The host does not wait for the device. Gradients are deterministic.

    Raises ValueError if the shapes do not fit together, `span` is not a block size, or `cu_seqlens` on the CPU are no
    running sums (on a GPU they are not read).

    Source: the selected branch of NSA (Yuan et al., 2025, section 3.4).
    """
    if others:
        refuse(others, "selected_attention", _REMEDIES)
    check_tensors(q, k, v)
    (batch, heads, q_len, dim), (_, kv_heads, k_len, _) = q.shape, k.shape
    index = checked_lists(index, batch, kv_heads, q_len, q.device)
    if index.shape[3] == 0:
        index = index.new_full((*index.shape[:3], 1), -1)
    if integer(span, "span", "tokens") not in BLOCKS:
        raise ValueError(f"span must be one of {', '.join(map(str, BLOCKS))}; got {span}.")
    group = heads // kv_heads
    if group > BLOCKS[-1]:
        raise ValueError(f"groups must be of at most {BLOCKS[-1]} query heads; got {group}.")
    rows = next(block for block in BLOCKS if block >= group)
    from sparseflash.masks.block_index import mask_of_queries  # imported late: masks are not part of the core

    causal, factor = flag(causal, "causal"), checked_scale(scale, dim)
    q, k, v = in_one_dtype(q, k, v)
    is_plain = scores is None and dropout_p == 0.0 and cu_seqlens is None
    if is_plain and chosen_blocks.serves(q, k, v, index, span, backend):
        found = chosen_blocks.block_attention(q, k, v, index, span=span, causal=causal, scale=factor)
        return found if return_lse else found[0]
    sizes, placed = Sizes(batch, heads, q_len, k_len, q.device), _as_it_is
    stop, tokens = None, None
    if cu_seqlens is not None:
        if q_len != k_len:
            raise ValueError(f"q and k must have the same tokens with cu_seqlens; got {q_len} and {k_len}.")
        of = _packed(cu_seqlens, k_len, span, causal, q.device)
        index = torch.where(index < 0, -1, index.long() + of.first[:, None])
        # Blocks of keys begin with their sequences. What lies between the sequences is dead.
        placed, tokens = of.placed, of.placed(torch.arange(k_len, device=q.device))
        k, v = (placed(x.mT).mT.contiguous() for x in (k, v))
        k_len, stop = of.room, of.stop
    changes, sink = (
        (None, None) if scores is None else in_rows(scores_of(scores), sizes, kv_heads, rows, placed, tokens)
    )
    # A mask has at least one batch element, query and key; `attention` gives zeros without these, and needs no mask.
    mask = mask_of_queries(index, rows, span, k_len, causal, stop) if batch and q_len and k_len else None
    packed = q.unflatten(1, (kv_heads, group)).transpose(2, 3)  # [B, Hkv, Nq, group, D]
    if rows > group:
        packed = torch.nn.functional.pad(packed, (0, 0, 0, rows - group))
    out, lse = attention(
        packed.flatten(2, 3), k, v, mask, scale=factor, return_lse=True, dropout_p=dropout_p, seed=seed, scores=changes,
        backend=backend,
    )  # fmt: skip
    out, lse = (_by_heads(x.unflatten(2, (q_len, rows)), group) for x in (out, lse))
    if sink is not None:
        out, lse = with_sink(out, lse, sink)
    return (out, lse) if return_lse else out


_REMEDIES = {
    "mask": (
        "index says what is live. Use attention with the mask of the same blocks and another one, "
        "masks.selected_keys(index, k_len=Nk, span=span, group=group) & mask"
    ),
    "lengths": "pack the sequences one behind the other, and pass cu_seqlens, their running sums",
}
without_others(selected_attention)


class _Packing(NamedTuple):
    places: Tensor  # int64 [N]: of each token
    first: Tensor  # int64 [N]: the first block of its sequence
    stop: Tensor  # int64 [N]: the end of what it may see
    room: int  # tokens of all blocks, and of some that no query sees, so that the host need not know the lengths

    def placed(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.room).index_copy(-1, self.places, x)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _packed(cu_seqlens: Any, tokens: int, span: int, causal: bool, device: torch.device) -> _Packing:
    sums = integer_tensor(cu_seqlens, "cu_seqlens", torch.device("cpu"))
    if sums.ndim != 1:
        raise ValueError(f"cu_seqlens must have one dimension; got {list(sums.shape)}.")
    if sums.device.type == "cpu" and not torch.compiler.is_compiling():
        shown = sums.tolist()
        if not shown or shown[0] != 0 or shown[-1] != tokens or shown != sorted(shown):
            raise ValueError(
                f"cu_seqlens must be running sums from 0 to the number of tokens, {tokens}, that do not decrease; got "
                f"{shown if len(shown) <= 8 else [*shown[:8], '...']}."
            )
    sums = sums.to(device)
    token = torch.arange(tokens, device=device)
    own = torch.searchsorted(sums, token, right=True) - 1
    lengths = torch.cat([sums.diff(), tokens - sums[-1:]])
    blocks = torch.div(lengths + span - 1, span, rounding_mode="floor")
    first = (blocks.cumsum(0) - blocks)[own]
    at = token - sums[own]
    stop = first * span + (at + 1 if causal else lengths[own])
    return _Packing(first * span + at, first, stop, (tokens // span + len(lengths)) * span)


def _by_heads(x: Tensor, group: int) -> Tensor:
    return x[:, :, :, :group].transpose(2, 3).flatten(1, 2)
