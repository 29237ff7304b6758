"""The sum of three tensors times their gates, in one pass over them, and its gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.device_functions.arithmetic import sigmoid
from sparseflash.backends.triton.launcher import OPTIONS, on_device
from sparseflash.backends.triton.selected.loads import columns, store_columns
from sparseflash.backends.triton.selected.sizes import readable, strides_of
from sparseflash.backends.triton.selected.tiles import power

_ROWS = 32  # of a tile


def forward(logits: Tensor, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The sum over c of `sigmoid(logits[b, n, c * H + h]) * parts[c][b, h, n]`, `[B, H, N, D]`."""
    a, b, c = (readable(x) for x in parts)
    out, logits = torch.empty_like(b), logits.contiguous()
    (batch, heads, rows, dim), tiles = out.shape, -(-out.shape[2] // _ROWS)
    with on_device(out.device):
        sum_kernel[(batch * heads * tiles,)](
            logits, a, b, c, out, heads, rows, tiles, strides_of(a, b, c, out), dim, power(dim), _ROWS, num_warps=4,
            **OPTIONS,
        )  # fmt: skip
    return out


def backward(dout: Tensor, logits: Tensor, parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The gradients of logits and of the three parts."""
    a, b, c = (readable(x) for x in parts)
    dout, logits = readable(dout), logits.contiguous()
    gradients = [torch.empty_like(x) for x in (logits, a, b, c)]
    (batch, heads, rows, dim), tiles = dout.shape, -(-dout.shape[2] // _ROWS)
    with on_device(dout.device):
        gradients_kernel[(batch * heads * tiles,)](
            dout, logits, a, b, c, *gradients, heads, rows, tiles, strides_of(dout, a, b, c, *gradients[1:]), dim,
            power(dim), _ROWS, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return tuple(gradients)


@triton.jit
def _place(heads, rows, tiles, ROWS: tl.constexpr):
    """`(batch, head, rows of a tile, which of them there are, the first gate of each row)`."""
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    row = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    return batch, head, row, row < rows, (batch * rows + row) * (3 * heads) + head


@triton.jit(do_not_specialize=["heads", "rows", "tiles"])
def sum_kernel(
    logits_ptr, a_ptr, b_ptr, c_ptr, out_ptr, heads, rows, tiles,
    strides,  # of batch, head and token, of the three parts and out
    DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes a tile of the sum."""
    batch, head, row, inside, gate = _place(heads, rows, tiles, ROWS)
    total = tl.zeros([ROWS, PADDED], tl.float32)
    for each in tl.static_range(3):
        x_ptr = a_ptr if each == 0 else (b_ptr if each == 1 else c_ptr)
        x = columns(
            x_ptr + batch * strides[each][0] + head * strides[each][1], row * strides[each][2], inside, 0, DIM, PADDED
        )  # fmt: skip
        logit = tl.load(logits_ptr + gate + each * heads, mask=inside, other=0.0).to(tl.float32)
        total += sigmoid(logit)[:, None] * x.to(tl.float32)
    store_columns(
        out_ptr + batch * strides[3][0] + head * strides[3][1], total, row * strides[3][2], inside, 0, DIM, PADDED
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "rows", "tiles"])
def gradients_kernel(
    dout_ptr, logits_ptr, a_ptr, b_ptr, c_ptr, dlogits_ptr, da_ptr, db_ptr, dc_ptr, heads, rows, tiles,
    strides,  # of batch, head and token, of dout, the three parts and their gradients
    DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes a tile of all gradients."""
    batch, head, row, inside, gate = _place(heads, rows, tiles, ROWS)
    dout = columns(
        dout_ptr + batch * strides[0][0] + head * strides[0][1], row * strides[0][2], inside, 0, DIM, PADDED
    ).to(tl.float32)  # fmt: skip
    for each in tl.static_range(3):
        x_ptr = a_ptr if each == 0 else (b_ptr if each == 1 else c_ptr)
        dx_ptr = da_ptr if each == 0 else (db_ptr if each == 1 else dc_ptr)
        x = columns(
            x_ptr + batch * strides[1 + each][0] + head * strides[1 + each][1], row * strides[1 + each][2], inside, 0,
            DIM, PADDED,
        )  # fmt: skip
        weight = sigmoid(tl.load(logits_ptr + gate + each * heads, mask=inside, other=0.0).to(tl.float32))
        dlogit = tl.sum(dout * x.to(tl.float32), 1) * weight * (1.0 - weight)
        tl.store(dlogits_ptr + gate + each * heads, dlogit.to(dlogits_ptr.dtype.element_ty), mask=inside)
        store_columns(
            dx_ptr + batch * strides[4 + each][0] + head * strides[4 + each][1], dout * weight[:, None],
            row * strides[4 + each][2], inside, 0, DIM, PADDED,
        )  # fmt: skip
