"""Full fp32 on tensor cores, which multiply bf16: every number as the sum of three pieces of 8 bits each.

x = x1 + x2 + x3 to 24 bits, which is all that fp32 has. Of the nine products of two such sums the three smallest are
left out, less than 2^-24 of the whole, half an ulp: six products of bf16, each exact and summed in fp32, are as good as
one of fp32, and tensor cores are fast enough that they take a fraction of the time. (The scheme is known as bf16x6; see
Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations", 2019.)

What is loaded again and again is split once, before; what a kernel computes, and what is loaded but once or twice, is
split where it is multiplied. What is infinite has pieces that sum to NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from sparseflash.backends.triton.cuda_graphs import refuse_to_record
from sparseflash.backends.triton.launcher import Launch
from sparseflash.blockmask.cache import bounded

# How the kernels are told to multiply, their PRECISION: tiles that lie in pieces, or tiles that are split as they are
# multiplied, each with or without correcting sums for what tensor cores cut off; or "tf32", which half precision
# ignores.
PIECES = tl.constexpr("pieces")
PIECES_CORRECTED = tl.constexpr("pieces, sums corrected")
WHOLE = tl.constexpr("bf16x6")
WHOLE_CORRECTED = tl.constexpr("bf16x6, sums corrected")
COUNT = 3
_TOKENS = 32  # a program
_LARGEST = tl.constexpr(3.3895313892515355e38)  # of bf16; larger numbers of fp32 would be rounded to infinity


@triton.jit
def leading_bits(x, dtype: tl.constexpr):
    """The first 8 bits of fp32 numbers, rounded. dtype: bf16, or fp32 for Triton's interpreter, which has no bf16."""
    if dtype == tl.bfloat16:
        return x.to(tl.bfloat16)
    else:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)


@triton.jit
def split(x, dtype: tl.constexpr, LARGE: tl.constexpr = False):
    """The three pieces of fp32 numbers, the largest first. Unless LARGE they must be at most 3.39e38."""
    if LARGE:
        first = leading_bits(tl.clamp(x, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL), dtype)
    else:
        first = leading_bits(x, dtype)
    rest = x - first.to(tl.float32)
    second = leading_bits(rest, dtype)
    third = leading_bits(rest - second.to(tl.float32), dtype)
    return first, second, third


@triton.jit
def six_products(x, y, PRECISION: tl.constexpr, MIRRORED: tl.constexpr, OVER_DIMS: tl.constexpr = True):
    """x y of two tiles in pieces, [X, Z] and [Z, Y], in fp32.

    MIRRORED: in the order of the six products of y^T x^T, so that both have the same bits where the same instructions
    sum them. OVER_DIMS: all terms of the sums count, as over the dims of tokens; few of the weights of a tile may, and
    where none is cut off nothing must be added.
    """
    small = small_products(x, y, MIRRORED)
    if OVER_DIMS:
        return corrected(tl.dot(x[0], y[0]), x[0].shape[1], small, PRECISION)
    else:
        return tl.dot(x[0], y[0], small)


@triton.jit
def corrected(product, LENGTH: tl.constexpr, rest, PRECISION: tl.constexpr):
    """product + rest. product: by tensor cores, a sum over LENGTH, of which some was cut off if PRECISION says so.

    Those of Hopper add 16 terms at a time to the sum before, and cut off what does not fit after each step (what a
    model of that found wrong on an H100, an H100 had wrong): sums are too small, the more, the longer. What is cut off
    on the average is added again; but not to small whole numbers, which sums of whole numbers are, exactly.
    """
    if PRECISION == PIECES_CORRECTED or PRECISION == WHOLE_CORRECTED:
        is_exact = (tl.floor(product) == product) & (tl.abs(product) < _SMALL)
        lost = tl.where(is_exact, 0.0, product * (_CUT_OFF * ((LENGTH // 16 + 1) / 2)))
        return product + (rest + lost)
    else:
        return product + rest


@triton.jit
def small_products(x, y, MIRRORED: tl.constexpr):
    """Five of the six, the smallest first: all but that of the first pieces, which is 2^8 times as large."""
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
    return total


@triton.jit
def products(x_tile, y_tile, PRECISION: tl.constexpr, MIRRORED: tl.constexpr = False):
    """x y^T of two tiles of tokens, [X_TOKENS, Y_TOKENS].

    In full fp32 over more than 128 dims it is the sum of two: what tensor cores cut off at each 16 dims adds up.
    """
    if PRECISION == PIECES or PRECISION == PIECES_CORRECTED:
        if x_tile[0].shape[1] > 128:
            x0_low, x0_high = halves(x_tile[0])
            x1_low, x1_high = halves(x_tile[1])
            x2_low, x2_high = halves(x_tile[2])
            y0_low, y0_high = halves(y_tile[0])
            y1_low, y1_high = halves(y_tile[1])
            y2_low, y2_high = halves(y_tile[2])
            low = six_products((x0_low, x1_low, x2_low), (y0_low.T, y1_low.T, y2_low.T), PRECISION, MIRRORED)
            high = six_products((x0_high, x1_high, x2_high), (y0_high.T, y1_high.T, y2_high.T), PRECISION, MIRRORED)
            return low + high
        else:
            return six_products(x_tile, (y_tile[0].T, y_tile[1].T, y_tile[2].T), PRECISION, MIRRORED)
    elif PRECISION != "tf32" and x_tile.shape[1] > 128:
        x_low, x_high = halves(x_tile)
        y_low, y_high = halves(y_tile)
        low = corrected(tl.dot(x_low, y_low.T, input_precision=_SPLITTING), x_low.shape[1], 0.0, PRECISION)
        return low + corrected(tl.dot(x_high, y_high.T, input_precision=_SPLITTING), x_low.shape[1], 0.0, PRECISION)
    elif PRECISION != "tf32":
        return corrected(tl.dot(x_tile, y_tile.T, input_precision=_SPLITTING), x_tile.shape[1], 0.0, PRECISION)
    else:
        return tl.dot(x_tile, y_tile.T, input_precision=PRECISION)


@triton.jit
def halves(tile):
    """The first and the second half of the columns."""
    return tl.split(tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1))


@triton.jit
def accumulate(a, b_tile, acc, PRECISION: tl.constexpr):
    """acc + a b, of computed numbers a in fp32 and a tile of tokens.

    In full fp32 the product is summed by itself first: tensor cores cut off where others round, always towards zero,
    which would add up over the tokens.
    """
    if PRECISION == PIECES or PRECISION == PIECES_CORRECTED:
        return acc + six_products(split(a, b_tile[0].dtype), b_tile, PRECISION, False, False)
    elif PRECISION == "tf32":
        return tl.dot(a.to(b_tile.dtype), b_tile, acc, input_precision="tf32")
    else:
        return tl.dot(a.to(b_tile.dtype), b_tile, acc, input_precision=_SPLITTING)


@triton.jit
def in_fp32(tile, PRECISION: tl.constexpr):
    """The numbers of a tile of tokens."""
    if PRECISION == PIECES or PRECISION == PIECES_CORRECTED:
        return tile[0].to(tl.float32) + tile[1].to(tl.float32) + tile[2].to(tl.float32)
    else:
        return tile.to(tl.float32)


@triton.jit(do_not_specialize=["heads", "length", "tiles"])
def pieces_kernel(
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
    first, second, third = split(x, pieces_ptr.dtype.element_ty, True)
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
    pieces = torch.empty(batch, heads, length, COUNT, padded_dim, dtype=PIECES_DTYPE, device=x.device)
    tiles = -(-length // _TOKENS)
    launch = _splitting(x.device, x.stride()[:3], dim, padded_dim, x.data_ptr() % 16)
    launch.start(batch * heads * tiles, x, pieces, heads, length, tiles, x.stride()[:3], dim, padded_dim, _TOKENS)
    return pieces


@bounded(maxsize=512)
def _splitting(device: torch.device, *layout: object) -> Launch:
    """layout: what Triton may specialise to."""
    refuse_to_record(device)  # it would be compiled, and loaded
    return Launch.of_all_arguments(pieces_kernel, device, num_warps=4, num_stages=1)


def precision_of(arithmetic: str, capability: tuple[int, int], *, in_pieces: bool) -> str:
    """The PRECISION of kernels for "half", "tf32" or "fp32". Sums are corrected on the GPUs that it was fitted on.

    >>> precision_of("half", (9, 0), in_pieces=False)
    'tf32'
    """
    if arithmetic != "fp32":
        return "tf32"
    if capability == _FITTED and not _INTERPRETED:  # Triton's interpreter rounds
        return str((PIECES_CORRECTED if in_pieces else WHOLE_CORRECTED).value)
    return str((PIECES if in_pieces else WHOLE).value)


_INTERPRETED = isinstance(pieces_kernel, InterpretedFunction)
PIECES_DTYPE = torch.float32 if _INTERPRETED else torch.bfloat16
# What two of those steps cut off, as a part of the sum, on the average, in the model of tests/tensor_cores.py: least is
# left then of sums of random terms. Fitted and tested on an H100 and an H200.
_CUT_OFF = tl.constexpr(0.36 * 2.0**-24)
_FITTED = (9, 0)
_SMALL = tl.constexpr(16384.0)  # a sum of other numbers is hardly ever whole below this
# For tl.dot, of tiles that are whole: Triton splits them itself; its one sum of six begins with the small ones. Its
# interpreter does not know that.
_SPLITTING = tl.constexpr("ieee" if _INTERPRETED else "bf16x6")
