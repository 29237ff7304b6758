"""Full fp32 on bf16 tensor cores: every number is split into a sum of three bf16 pieces with 8 bits each.

x = x1 + x2 + x3 to 24 bits, the full precision of fp32. A product of two such sums has nine terms; the three smallest,
together less than half an ulp, are dropped. So six bf16 products, each exact and summed in fp32, are as good as one
fp32 product, and faster on tensor cores (bf16x6; Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial
Intelligence Datatype For Higher-Precision Computations", 2019).

The pieces of an infinity sum to NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.availability import INTERPRETED
from sparseflash.backends.triton.device import multiplies_in_tf32
from sparseflash.backends.triton.launcher import launches_of

# Values of the kernels' PRECISION: tiles stored in pieces, or whole tiles that are split where they are multiplied,
# each with or without a correction for the truncation of tensor cores. The other value is "tf32", for TF32 and for
# half precision, which ignores it.
PIECES = tl.constexpr("pieces")
PIECES_CORRECTED = tl.constexpr("pieces, sums corrected")
WHOLE = tl.constexpr("bf16x6")
WHOLE_CORRECTED = tl.constexpr("bf16x6, sums corrected")
PIECE_COUNT = 3
_TOKENS = 32  # per program
_LARGEST = tl.constexpr(3.3895313892515355e38)  # of bf16; larger fp32 numbers would be rounded to infinity


@triton.jit
def leading_bits(x, dtype: tl.constexpr):
    """Rounds fp32 numbers to 8 significant bits. dtype: bf16, or fp32 in Triton's interpreter, which lacks bf16."""
    if dtype == tl.bfloat16:
        return x.to(tl.bfloat16)
    else:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)


@triton.jit
def split(x, dtype: tl.constexpr, LARGE: tl.constexpr = False):
    """The three pieces of fp32 numbers, the largest first. Unless LARGE, the numbers must be at most 3.39e38."""
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

    MIRRORED: add the six products in the order of y^T x^T, so that both have the same bits if the same instructions sum
    them. OVER_DIMS: the sum is over head dims, and its truncation is corrected. A sum over tokens is not, because few
    weights may contribute and then nothing is truncated.
    """
    small = small_products(x, y, MIRRORED)
    if PRECISION == WHOLE or PRECISION == WHOLE_CORRECTED:  # the second and third piece of an infinity are NaN
        small = tl.where(small == small, small, 0.0)
    if OVER_DIMS:
        return corrected(tl.dot(x[0], y[0]), x[0].shape[1], small, PRECISION)
    else:
        return tl.dot(x[0], y[0], small)


@triton.jit
def corrected(product, LENGTH: tl.constexpr, rest, PRECISION: tl.constexpr):
    """product + rest, with the average truncation of product added back if PRECISION says so.

    product: a sum of LENGTH terms by tensor cores. Hopper's add 16 terms at a time to the running sum and truncate
    after each step (a model of this has the same errors as an H100), so a sum's magnitude is too small, the more the
    longer it is. Small whole numbers, whose sums are exact, are not corrected.
    """
    if PRECISION == PIECES_CORRECTED or PRECISION == WHOLE_CORRECTED:
        is_exact = (tl.floor(product) == product) & (tl.abs(product) < _SMALL)
        lost = tl.where(is_exact, 0.0, product * (_CUT_OFF * ((LENGTH // 16 + 1) / 2)))
        return product + (rest + lost)
    else:
        return product + rest


@triton.jit
def small_products(x, y, MIRRORED: tl.constexpr):
    """The sum of five of the six products, the smallest first. The product of the first pieces, 2^8 times as large, is
    left out.
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
    return total


@triton.jit
def products(x_tile, y_tile, PRECISION: tl.constexpr, MIRRORED: tl.constexpr = False):
    """x y^T of two tiles of tokens, [X_TOKENS, Y_TOKENS].

    In full fp32 more than 128 dims are summed in two halves, because the truncation at every 16 dims accumulates.
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
        low = product_of_whole(x_low, y_low.T, PRECISION, MIRRORED)
        return low + product_of_whole(x_high, y_high.T, PRECISION, MIRRORED)
    elif PRECISION != "tf32":
        return product_of_whole(x_tile, y_tile.T, PRECISION, MIRRORED)
    else:
        return tl.dot(x_tile, y_tile.T, input_precision=PRECISION)


@triton.jit
def product_of_whole(x, y, PRECISION: tl.constexpr, MIRRORED: tl.constexpr):
    """x y. The tiles are split here, because Triton's own bf16x6 cannot add the six products in the MIRRORED order.

    The interpreter multiplies in fp32 and needs no pieces.
    """
    if _SPLITTING == "ieee":
        return tl.dot(x, y, input_precision=_SPLITTING)
    else:
        return six_products(split(x, tl.bfloat16), split(y, tl.bfloat16), PRECISION, MIRRORED)


@triton.jit
def halves(tile):
    """The first and the second half of the columns."""
    return tl.split(tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1))


@triton.jit
def accumulate(a, b_tile, acc, PRECISION: tl.constexpr):
    """acc + a b. a: computed fp32 numbers. b_tile: a tile of tokens.

    In full fp32 the product is summed separately and then added, because tensor cores truncate towards zero, which
    would accumulate over all tokens.
    """
    if PRECISION == PIECES or PRECISION == PIECES_CORRECTED:
        return acc + six_products(split(a, b_tile[0].dtype), b_tile, PRECISION, False, False)
    elif PRECISION == "tf32":
        return tl.dot(a.to(b_tile.dtype), b_tile, acc, input_precision="tf32")
    else:
        return tl.dot(a.to(b_tile.dtype), b_tile, acc, input_precision=_SPLITTING)


@triton.jit
def in_fp32(tile, PRECISION: tl.constexpr):
    """The numbers of a tile of tokens in fp32."""
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
    """Writes the pieces of TOKENS tokens, with zeros past DIM."""
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

    Takes 1.5 times the memory of `x`, or more if `padded_dim` exceeds D. The last dimension of `x` must be contiguous.
    """
    batch, heads, length, dim = x.shape
    pieces = torch.empty(batch, heads, length, PIECE_COUNT, padded_dim, dtype=PIECES_DTYPE, device=x.device)
    tiles = -(-length // _TOKENS)
    _splitting(x.device, x.stride()[:3], dim, padded_dim, x.data_ptr() % 16).start(
        batch * heads * tiles, x, pieces, heads, length, tiles, x.stride()[:3], dim, padded_dim, _TOKENS
    )
    return pieces


def is_in_pieces(x: Tensor) -> bool:
    """Whether `x` is a result of `in_pieces`: only these tensors have five dimensions."""
    return x.ndim == 5


_splitting = launches_of(pieces_kernel, num_warps=4, num_stages=1, most=512)


def precision_of(arithmetic: str, *, in_pieces: bool, corrected: bool) -> str:
    """The PRECISION of kernels for "half", "tf32" or "fp32".

    >>> precision_of("half", in_pieces=False, corrected=True)
    'tf32'
    """
    if arithmetic != "fp32":
        return "tf32"
    if corrected and not INTERPRETED:
        return str((PIECES_CORRECTED if in_pieces else WHOLE_CORRECTED).value)
    return str((PIECES if in_pieces else WHOLE).value)


PIECES_DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
# The average share of a sum that two truncation steps cut off. Fitted for the least error of sums of random terms in
# the model of tests/interpreting/products.py, and tested on an H100 and an H200.
_CUT_OFF = tl.constexpr(0.36 * 2.0**-24)
_SMALL = tl.constexpr(16384.0)  # a sum of other numbers is rarely whole below this
# The input_precision of sums over tokens for whole tiles: Triton splits them. Its interpreter does not support
# bf16x6.
_SPLITTING = tl.constexpr("ieee" if INTERPRETED else "bf16x6")


def input_precision(dtype: torch.dtype) -> str:
    """The input_precision of `tl.dot` for tensors of a dtype, in kernels that leave the splitting of fp32 to Triton."""
    return str(_SPLITTING.value) if dtype == torch.float32 and not multiplies_in_tf32() else "tf32"
