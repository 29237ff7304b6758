"""The sums of `sparseflash.merge` as Triton kernels, forward and backward: each reads and writes every number once.

PyTorch's operations would make some thirty passes over fp32 tensors, which take longer than attention to few keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.launcher import OPTIONS, on_device

_NUMBERS = 4096  # of each tensor, for a program


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of the parts `outs [B, H, N, D]` and `lses [B, H, N]`."""
    outs, lses = _alike(outs), tuple(lse.contiguous() for lse in lses)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    grid, sizes = _grid(out)
    with on_device(out.device):
        merge_kernel[grid](outs, lses, out, lse, *sizes, **OPTIONS)
    return out, lse


def merge_backward(
    dout: Tensor, dlse: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of `outs` and `lses`."""
    dout, *outs = _alike([dout, *outs])
    lses = tuple(lse.contiguous() for lse in lses)
    douts, dlses = [torch.empty_like(dout) for _ in outs], [torch.empty_like(lse) for lse in lses]
    grid, sizes = _grid(dout)
    with on_device(dout.device):
        merge_backward_kernel[grid](
            dout, dlse.contiguous(), tuple(outs), lses, tuple(douts), tuple(dlses), *sizes, **OPTIONS
        )  # fmt: skip
    return douts, dlses


def _alike(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    first = tensors[0]
    if first.stride(-1) != 1 or torch.empty_like(first).stride() != first.stride():
        first = first.contiguous()
    return first, *(x if x.stride() == first.stride() else torch.empty_like(first).copy_(x) for x in tensors[1:])


def _grid(x: Tensor) -> tuple[tuple[int], tuple[int, ...]]:
    batch, heads, tokens, dim = x.shape
    padded = triton.next_power_of_2(dim)
    rows = max(1, _NUMBERS // padded)
    count = batch * heads * tokens
    return (triton.cdiv(count, rows),), (count, heads, tokens, *x.stride()[:3], dim, padded, rows)


@triton.jit
def _rows(
    count, heads, tokens, stride_b, stride_h, stride_n, D: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, pair = row % tokens, row // tokens
    first = pair // heads * stride_b + pair % heads * stride_h + token * stride_n
    column = tl.arange(0, PADDED)
    return row, row < count, first[:, None] + column[None, :], (row < count)[:, None] & (column < D)[None, :]


@triton.jit
def _shares(lses, row, inside):
    highest = tl.load(lses[0] + row, mask=inside, other=0.0)
    for part in tl.static_range(1, len(lses)):
        highest = tl.maximum(highest, tl.load(lses[part] + row, mask=inside, other=0.0))
    safe = tl.where(highest == float("-inf"), 0.0, highest)  # -inf - -inf would be NaN
    total = tl.zeros_like(safe)
    for part in tl.static_range(len(lses)):
        total += tl.exp(tl.load(lses[part] + row, mask=inside, other=0.0) - safe)
    divisor = tl.where(total == 0.0, 1.0, total)
    shares = ()
    for part in tl.static_range(len(lses)):
        share = tl.exp(tl.load(lses[part] + row, mask=inside, other=0.0) - safe) / divisor
        shares = shares + (share,)  # type: ignore[assignment]  # noqa: RUF005 - Triton unpacks none
    return tl.where(total == 0.0, float("-inf"), safe + tl.log(divisor)), shares


@triton.jit
def _own(out_ptr, lse_ptr, row, inside, at, all_inside):
    """The out of a part, fp32: 0 for queries without keys, which are not read, because 0 times NaN is NaN."""
    has_keys = tl.load(lse_ptr + row, mask=inside, other=0.0) != float("-inf")
    return tl.load(out_ptr + at, mask=all_inside & has_keys[:, None], other=0.0).to(tl.float32)


@triton.jit
def _weighted(outs, lses, shares, row, inside, at, all_inside):
    merged = shares[0][:, None] * _own(outs[0], lses[0], row, inside, at, all_inside)
    for part in tl.static_range(1, len(outs)):
        merged += shares[part][:, None] * _own(outs[part], lses[part], row, inside, at, all_inside)
    return merged


@triton.jit(do_not_specialize=["count", "heads", "tokens"])
def merge_kernel(
    outs, lses, out_ptr, lse_ptr, count, heads, tokens, stride_b, stride_h, stride_n,
    D: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out and lse of some rows, summed in the order of the parts."""
    row, inside, at, all_inside = _rows(count, heads, tokens, stride_b, stride_h, stride_n, D, PADDED, ROWS)
    lse, shares = _shares(lses, row, inside)
    merged = _weighted(outs, lses, shares, row, inside, at, all_inside)
    tl.store(out_ptr + at, merged.to(out_ptr.dtype.element_ty), mask=all_inside)
    tl.store(lse_ptr + row, lse, mask=inside)


@triton.jit(do_not_specialize=["count", "heads", "tokens"])
def merge_backward_kernel(
    dout_ptr, dlse_ptr, outs, lses, douts, dlses, count, heads, tokens, stride_b, stride_h, stride_n,
    D: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients of some rows of the parts. out is recomputed, because its difference from a part would be inexact
    in half precision.
    """
    row, inside, at, all_inside = _rows(count, heads, tokens, stride_b, stride_h, stride_n, D, PADDED, ROWS)
    lse, shares = _shares(lses, row, inside)
    merged = _weighted(outs, lses, shares, row, inside, at, all_inside)
    dout = tl.load(dout_ptr + at, mask=all_inside, other=0.0).to(tl.float32)
    dlse = tl.where(lse == float("-inf"), 0.0, tl.load(dlse_ptr + row, mask=inside, other=0.0))
    for part in tl.static_range(len(outs)):
        own = _own(outs[part], lses[part], row, inside, at, all_inside)
        share = shares[part]
        tl.store(douts[part] + at, (share[:, None] * dout).to(dout_ptr.dtype.element_ty), mask=all_inside)
        tl.store(dlses[part] + row, share * (tl.sum(dout * (own - merged), 1) + dlse), mask=inside)
