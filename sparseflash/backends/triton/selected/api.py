"""Launches the kernels for chosen tokens, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.registration import empty_gradient, empty_lse, empty_out
from sparseflash.backends.triton.architecture import architecture_of
from sparseflash.backends.triton.availability import INTERPRETED, check_runs
from sparseflash.backends.triton.device import capability_of, multiplies_in_tf32
from sparseflash.backends.triton.device_functions.softmax import LOG2E
from sparseflash.backends.triton.launcher import on_device
from sparseflash.backends.triton.selected.forward import forward_kernel
from sparseflash.backends.triton.selected.lists import sort_kernel
from sparseflash.backends.triton.selected.places import count_kernel, mark_kernel, place_kernel
from sparseflash.backends.triton.selected.score_gradients import dq_kernel, score_gradients_kernel
from sparseflash.backends.triton.selected.tiles import MOST_DIM, MOST_HEADS, Shape, dq_tile, power, rows_tile, shape_of
from sparseflash.backends.triton.selected.token_sums import rows_kernel, sum_kernel
from sparseflash.limits import COUNT, check_count

MOST_CHOICES = 8192  # of a list, which one program sorts
_SCRATCH = 2 << 30  # bytes for the rows of a chunk of queries; a constant, because chunks decide the order of sums
_MOST_QUERIES = 1024  # of a chunk: a token has a bit for each
_TOKENS = 64  # of a tile of a program that walks a list
_FP32 = "ieee" if INTERPRETED else "bf16x6"  # products of fp32: see device_functions/fp32_split.py


class Chosen(NamedTuple):
    """The lists of chosen tokens, sorted: see `lists.sort_kernel`."""

    lists: Tensor  # int32 [B, Hkv, Nq, K]
    counts: Tensor  # int32 [B, Hkv, Nq]


class _Sizes(NamedTuple):
    """What all kernels of one call share."""

    batch: int
    kv_heads: int
    group: int
    q_len: int
    k_len: int
    choices: int
    precision: str
    keep: bool
    shape: Shape
    options: dict[str, int]
    qk_scale: float
    scale: float

    @property
    def rows(self) -> int:
        """Lists."""
        return self.batch * self.kv_heads * self.q_len

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.q_len, self.k_len, self.kv_heads, self.group, self.choices


def check(q: Tensor, k: Tensor, v_dim: int, choices: int) -> None:
    """Raises an error unless the kernels take these tensors."""
    check_runs(q)
    if q.dtype == torch.float64:
        raise TypeError("the triton backend takes fp16, bf16 and fp32; got fp64. Use backend='reference'.")
    group = q.shape[1] // k.shape[1]
    if group > MOST_HEADS:
        raise ValueError(f"groups must be of at most {MOST_HEADS} query heads for the triton backend; got {group}.")
    if max(q.shape[3], v_dim) > MOST_DIM:
        raise ValueError(
            f"head dims must be at most {MOST_DIM} for the triton backend; got D = {q.shape[3]} and Dv = {v_dim}. Use "
            "backend='reference'."
        )
    if choices > MOST_CHOICES:
        raise ValueError(
            f"index must list at most {MOST_CHOICES} tokens of a query for the triton backend; got {choices}. Use "
            "attention with a mask."
        )
    check_count("batch x key heads x queries x tiles of heads", k.shape[0], k.shape[1], q.shape[2], group, remedy="Split the batch.")


def forward(
    q: Tensor, k: Tensor, v: Tensor | None, index: Tensor, v_dim: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Chosen, Tensor]:
    """`(out, lse, chosen, kept)`. v: None if the first `v_dim` columns of k are the values (`shares_values`)."""
    like_v = k[..., :v_dim] if v is None else v
    out, lse = empty_out(q, like_v), empty_lse(q)
    choices = index.shape[3]
    chosen = Chosen(
        torch.empty(index.shape, dtype=torch.int32, device=q.device),
        torch.empty(index.shape[:3], dtype=torch.int32, device=q.device),
    )
    of = _sizes(q, k, v, v_dim, choices, scale, backward=False)
    kept = torch.empty((2, *lse.shape) if of.keep else (0,), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse, chosen, kept
    q, k, v = _readable(q), _readable(k), None if v is None else _readable(v)
    index = index if index.stride(-1) == 1 or choices == 1 else index.contiguous()
    with on_device(q.device):
        sort_kernel[(of.rows,)](
            index, *chosen, of.q_len, of.k_len, of.k_len - of.q_len, choices, *index.stride()[:3], of.kv_heads, causal,
            power(choices), num_warps=4 if choices <= 2048 else 8,
        )  # fmt: skip
        forward_kernel[(of.rows * of.shape.TILES,)](
            q, k, v, *chosen, out, lse, kept if of.keep else None, *of.numbers, 0, lse.numel(), scale, of.qk_scale,
            _strides(q, k, v, out), of.shape, **of.options,
        )  # fmt: skip
    return out, lse, chosen, kept


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, out: Tensor, lse: Tensor,
    chosen: Chosen, kept: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`(dq, dk, dv)`; without v, dk holds the gradients of keys and values, and dv is None."""
    dq = empty_gradient(q)
    v_dim = out.shape[3]
    of = _sizes(q, k, v, v_dim, chosen.lists.shape[3], scale, backward=True)
    size = of.batch * of.kv_heads * of.k_len
    dim = q.shape[3]
    sums = [torch.zeros(size, width, dtype=torch.float32, device=q.device) for width in (dim, v_dim)[: 1 + (v is not None)]]
    if lse.numel() and of.choices and size:
        q_, k_, v_, dout = _readable(q), _readable(k), None if v is None else _readable(v), _readable(dout)
        dlse = None if dlse is None else dlse.contiguous()
        written = dq if dq.stride(-1) == 1 else torch.empty(dq.shape, dtype=dq.dtype, device=dq.device)
        with on_device(q.device):
            for first, pairs, queries in _chunks(of, dim + (0 if v is None else v_dim), q.element_size()):
                _backward_of_chunk(
                    _Tensors(q_, k_, v_, dout, out, lse, dlse, kept, written, chosen), sums, of, first, pairs, queries
                )
        if written is not dq:
            dq.copy_(written)
    else:
        dq.zero_()
    gradients = [empty_gradient(x).copy_(total.view(x.shape)) for x, total in zip((k, v), sums) if x is not None]
    return dq, gradients[0], gradients[1] if v is not None else None


class _Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor | None
    dout: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    kept: Tensor
    dq: Tensor
    chosen: Chosen


def _backward_of_chunk(
    x: _Tensors, sums: list[Tensor], of: _Sizes, first_row: int, pairs: int, queries: int
) -> None:
    """Writes dq of the lists from `first_row` on, and adds to the sums of keys and values."""
    rows, device, dtype = pairs * queries, x.q.device, x.q.dtype
    p, ds = torch.empty(2, rows * of.group, of.choices, dtype=dtype, device=device)
    score_gradients_kernel[(rows * of.shape.TILES,)](
        x.q, x.k, x.v, x.dout, x.out, *x.chosen, x.lse, x.kept if of.keep else None, x.dlse, p, ds, *of.numbers,
        first_row, x.lse.numel(), of.scale, of.qk_scale, _strides(x.q, x.k, x.v, x.dout, x.out), of.shape,
        **of.options,
    )  # fmt: skip
    tile = dq_tile(of.group, dtype.itemsize)
    for column, count in ((0, of.shape.LOW), (of.shape.PADDED_LOW, of.shape.HIGH)):
        if count:
            piece = min(power(count), tile.columns)
            dq_kernel[(rows * tile.tiles * -(-count // piece),)](
                ds, x.k, *x.chosen, x.dq, *of.numbers, first_row, _strides(x.k, x.dq), column, count, piece, tile.heads,
                tile.tiles, tile.tokens, of.precision, of.shape.FAR, num_warps=tile.warps(piece), num_stages=3,
            )  # fmt: skip
    counts, ends, places = _places(x.chosen, of, first_row, pairs, queries)
    first_token = first_row // of.q_len * of.k_len
    dim, v_dim = x.q.shape[3], x.out.shape[3]
    work: list[tuple[int, list[tuple[Any, ...]]]] = []
    if x.v is None:
        work.append((dim, [(x.q, ds, x.dout, p, 0, v_dim), (x.q, ds, None, None, v_dim, dim - v_dim)]))
    else:
        work.append((dim, [(x.q, ds, None, None, 0, dim)]))
        work.append((v_dim, [(x.dout, p, None, None, 0, v_dim)]))
    for (width, products), total in zip(work, sums, strict=True):
        partial = torch.empty(rows * of.choices, width, dtype=torch.float32, device=device)
        for left, weights, other, other_weights, column, count in products:
            if count == 0:
                continue
            tile = rows_tile(of.group, dtype.itemsize)
            piece = min(power(count), tile.columns)
            rows_kernel[(rows * -(-count // piece),)](
                left, weights, other, other_weights, x.chosen.counts, places, partial, of.q_len, of.kv_heads, of.group,
                of.choices, first_row, width, _strides(left, other), piece, column, count, tile.heads, tile.tokens,
                of.precision, num_warps=tile.warps(piece), num_stages=2,
            )  # fmt: skip
        wide = power(width)
        sum_kernel[(pairs * of.k_len,)](
            partial, counts, ends, total, first_token, width, wide, max(1, 4096 // wide), num_warps=4, num_stages=2
        )  # fmt: skip


def _places(
    chosen: Chosen, of: _Sizes, first_row: int, pairs: int, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`(counts, ends, places)`: choices of each token, their running sums, and the place of each choice."""
    device, tokens = chosen.lists.device, pairs * of.k_len
    words = power(-(-queries // 32), 1)
    bits = torch.zeros(tokens, words, dtype=torch.int32, device=device)
    counts = torch.empty(tokens, dtype=torch.int32, device=device)
    places = torch.empty(pairs * queries, of.choices, dtype=torch.int32, device=device)
    numbers = (first_row, queries, of.k_len, of.choices, words)
    mark_kernel[(pairs * queries,)](*chosen, bits, *numbers, 128, num_warps=4)
    count_kernel[(-(-tokens // 64),)](bits, counts, tokens, words, 64, num_warps=4)
    ends = counts.cumsum(0, dtype=torch.int64)
    place_kernel[(pairs * queries,)](*chosen, bits, ends, places, *numbers, _TOKENS, num_warps=4)
    return counts, ends, places


def _chunks(of: _Sizes, width: int, size: int) -> list[tuple[int, int, int]]:
    """`(first list, pairs of batch element and key head, queries of each)` of the chunks of a backward.

    A chunk has whole pairs, or a part of the queries of one pair.
    """
    of_query = of.choices * (4 * width + 2 * size * of.group)
    most = min(max(1, _SCRATCH // of_query), max(1, (COUNT - 1) // (of.choices * of.group)))
    pairs = of.batch * of.kv_heads
    if of.q_len <= min(most, _MOST_QUERIES):
        many = most // of.q_len
        return [(first * of.q_len, min(many, pairs - first), of.q_len) for first in range(0, pairs, many)]
    queries = min(most, _MOST_QUERIES)
    return [
        (pair * of.q_len + first, 1, min(queries, of.q_len - first))
        for pair in range(pairs)
        for first in range(0, of.q_len, queries)
    ]


def _sizes(
    q: Tensor, k: Tensor, v: Tensor | None, v_dim: int, choices: int, scale: float, *, backward: bool
) -> _Sizes:
    keep = q.dtype == torch.float32
    precision = _FP32 if keep and not multiplies_in_tf32() else "tf32"
    group = q.shape[1] // k.shape[1]
    shape, warps, stages = shape_of(
        q.shape[3], v_dim, group, size=q.element_size(), keep=keep, precision=precision, shared=v is None,
        backward=backward, far=_reach(k, v) >= COUNT, memory=architecture_of(capability_of(q.device)).shared_memory,
    )  # fmt: skip
    return _Sizes(
        k.shape[0], k.shape[1], group, q.shape[2], k.shape[2], choices, precision, keep, shape,
        {"num_warps": warps, "num_stages": stages}, scale * LOG2E.value, scale,
    )  # fmt: skip


def _reach(*tensors: Tensor | None) -> int:
    """The largest offset of a token from the first one."""
    return max(x.shape[2] * x.stride(2) for x in tensors if x is not None)


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor | None) -> tuple[tuple[int, ...], ...]:
    """The strides of batch, head and token of each tensor."""
    return tuple((0, 0, 0) if x is None else tuple(x.stride()[:3]) for x in tensors)
