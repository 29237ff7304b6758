"""Full fp32 on tensor cores, which multiply bf16: every number as the sum of three pieces of 8 bits each.

x = x1 + x2 + x3 to 24 bits, which is all that fp32 has. Of the nine products of two such sums the three smallest are
left out, at most 2^-25 of the whole: six products of bf16, each exact and summed in fp32, are as good as one of fp32,
and tensor cores are fast enough that they take a fraction of the time. (The scheme is known as bf16x6; see
Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations", 2019.)

What is loaded again and again is split once, before; what a kernel computes is split where it stands. Numbers above
3.39e38 are too large for the first piece, and give infinities.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from sparseflash.prepared import Prepared

# How the kernels are told: their PRECISION.
PIECES = tl.constexpr("pieces")
COUNT = 3
_TOKENS = 32  # a program


@triton.jit
def leading_bits(x, dtype: tl.constexpr):
    """The first 8 bits of fp32 numbers, rounded. dtype: bf16, or fp32 for Triton's interpreter, which has no bf16."""
    if dtype == tl.bfloat16:
        return x.to(tl.bfloat16)
    else:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x8000) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def split(x, dtype: tl.constexpr):
    """The three pieces of fp32 numbers, the largest first."""
    first = leading_bits(x, dtype)
    rest = x - first.to(tl.float32)
    second = leading_bits(rest, dtype)
    third = leading_bits(rest - second.to(tl.float32), dtype)
    return first, second, third


@triton.jit
def six_products(x, y, MIRRORED: tl.constexpr):
    """x y of two tiles in pieces, [X, Z] and [Z, Y], the smallest products first.

    MIRRORED: in the order of the six products of y^T x^T, so that both have the same bits.
    """
    total = tl.dot(x[1], y[1])
    if MIRRORED:
        total = tl.dot(x[0], y[2], total)
        total = tl.dot(x[2], y[0], total)
        total = tl.dot(x[0], y[1], total)
        total = tl.dot(x[1], y[0], total)
    else:
        total = tl.dot(x[2], y[0], total)
        total = tl.dot(x[0], y[2], total)
        total = tl.dot(x[1], y[0], total)
        total = tl.dot(x[0], y[1], total)
    return tl.dot(x[0], y[0], total)


@triton.jit
def products(x_tile, y_tile, PRECISION: tl.constexpr, MIRRORED: tl.constexpr = False):
    """x y^T of two tiles of tokens, [X_TOKENS, Y_TOKENS]."""
    if PRECISION == PIECES:
        return six_products(x_tile, (y_tile[0].T, y_tile[1].T, y_tile[2].T), MIRRORED)
    else:
        return tl.dot(x_tile, y_tile.T, input_precision=PRECISION)


@triton.jit
def accumulate(a, b_tile, acc, PRECISION: tl.constexpr):
    """acc + a b, of computed numbers a in fp32 and a tile of tokens.

    In full fp32 the product is summed by itself first, so that rounding errors grow with the root of the tiles, not of
    the tokens.
    """
    if PRECISION == PIECES:
        return acc + six_products(split(a, b_tile[0].dtype), b_tile, False)
    else:
        return tl.dot(a.to(b_tile.dtype), b_tile, acc, input_precision=PRECISION)


@triton.jit
def in_fp32(tile, PRECISION: tl.constexpr):
    """The numbers of a tile of tokens."""
    if PRECISION == PIECES:
        return tile[0].to(tl.float32) + tile[1].to(tl.float32) + tile[2].to(tl.float32)
    else:
        return tile.to(tl.float32)


@triton.jit(do_not_specialize=["heads", "length", "tiles"])
def split_kernel(
    x_ptr, pieces_ptr,  # [B, H, N, DIM], [B, H, N, 3, PADDED_DIM] contiguous
    heads, length, tiles, strides,  # of batch, head, token
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The pieces of some tokens, zeros past DIM."""
    batch_head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    dims = tl.arange(0, PADDED_DIM)
    inside = (tokens < length)[:, None]
    start = tl.cast(batch_head // heads, tl.int64) * strides[0] + tl.cast(batch_head % heads, tl.int64) * strides[1]
    at = tl.cast(tokens, tl.int64)[:, None] * strides[2] + dims[None, :]
    x = tl.load(x_ptr + start + at, mask=inside & (dims < DIM)[None, :], other=0.0)
    first, second, third = split(x, pieces_ptr.dtype.element_ty)
    row = (tl.cast(batch_head, tl.int64) * length + tokens)[:, None] * (3 * PADDED_DIM)
    out = pieces_ptr + row + dims[None, :]
    tl.store(out, first, mask=inside)
    tl.store(out + PADDED_DIM, second, mask=inside)
    tl.store(out + 2 * PADDED_DIM, third, mask=inside)


def in_pieces(x: Tensor, padded_dim: int) -> Tensor:
    """The pieces of `x [B, H, N, D]`, fp32: `[B, H, N, 3, padded_dim]`, bf16 (in Triton's interpreter fp32).

    1.5 times the memory of `x`, or more where `padded_dim` is more than D. The last dimension of `x` is contiguous.
    """
    batch, heads, length, dim = x.shape
    dtype = torch.float32 if _INTERPRETED else torch.bfloat16
    pieces = torch.empty(batch, heads, length, COUNT, padded_dim, dtype=dtype, device=x.device)
    tiles = -(-length // _TOKENS)
    launch = _splitting(x.device, batch * heads * tiles, x.stride()[:3], dim, padded_dim, x.data_ptr() % 16)
    launch.run(x, pieces, heads, length, tiles, x.stride()[:3], dim, padded_dim, _TOKENS)
    return pieces


@lru_cache(maxsize=512)
def _splitting(device: torch.device, programs: int, *layout: object) -> Prepared:
    """layout: what Triton may specialise to."""
    return Prepared(split_kernel, programs, device, 4, 1)


_INTERPRETED = isinstance(split_kernel, InterpretedFunction)
# For tl.dot, of tiles that are whole: Triton splits them itself, in the same way. Its interpreter does not know that.
WITHOUT_PIECES = "ieee" if _INTERPRETED else "bf16x6"
