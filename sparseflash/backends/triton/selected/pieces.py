"""Tiles of rows in two pieces of channels, for head dims such as 576 = 512 + 64. Others have one piece, given twice."""

import triton
import triton.language as tl

from sparseflash.backends.triton.selected.loads import columns, store_columns


@triton.jit
def load_pieces(x_ptr, offsets, live, SHAPE: tl.constexpr):
    """The rows of queries or keys at `offsets`: see `columns`."""
    low = columns(x_ptr, offsets, live, 0, SHAPE.LOW, SHAPE.PADDED_LOW)
    high = low
    if SHAPE.HIGH > 0:
        high = columns(x_ptr, offsets, live, SHAPE.PADDED_LOW, SHAPE.HIGH, SHAPE.PADDED_HIGH)
    return low, high


@triton.jit
def store_pieces(x_ptr, low, high, offsets, live, SHAPE: tl.constexpr):
    """Stores rows where `load_pieces` would read them."""
    store_columns(x_ptr, low, offsets, live, 0, SHAPE.LOW, SHAPE.PADDED_LOW)
    if SHAPE.HIGH > 0:
        store_columns(x_ptr, high, offsets, live, SHAPE.PADDED_LOW, SHAPE.HIGH, SHAPE.PADDED_HIGH)


@triton.jit
def zeros_in_pieces(ROWS: tl.constexpr, SHAPE: tl.constexpr):
    """fp32 zeros for the sums of `plus_products`."""
    PADDED_LOW: tl.constexpr = SHAPE.PADDED_LOW  # a list takes no attribute of SHAPE under Triton 3.6
    PADDED_HIGH: tl.constexpr = SHAPE.PADDED_HIGH
    low = tl.zeros([ROWS, PADDED_LOW], tl.float32)
    high = low
    if SHAPE.HIGH > 0:
        high = tl.zeros([ROWS, PADDED_HIGH], tl.float32)
    return low, high


@triton.jit
def plus_products(low, high, x, y_low, y_high, SHAPE: tl.constexpr):
    """The sums plus x y."""
    low = tl.dot(x, y_low, low, input_precision=SHAPE.PRECISION)
    if SHAPE.HIGH > 0:
        high = tl.dot(x, y_high, high, input_precision=SHAPE.PRECISION)
    return low, high


@triton.jit
def product(x_low, x_high, y_low, y_high, SHAPE: tl.constexpr):
    """x y^T, the smaller product first."""
    if SHAPE.HIGH > 0:
        found = tl.dot(x_high, y_high.T, input_precision=SHAPE.PRECISION)
        return tl.dot(x_low, y_low.T, found, input_precision=SHAPE.PRECISION)
    else:
        return tl.dot(x_low, y_low.T, input_precision=SHAPE.PRECISION)


@triton.jit
def scores_of(q_low, q_high, k_ptr, offsets, live, SHAPE: tl.constexpr):
    """`(scores, keys in two pieces)` of the keys at `offsets`."""
    k_low, k_high = load_pieces(k_ptr, offsets, live, SHAPE)
    return product(q_low, q_high, k_low, k_high, SHAPE), k_low, k_high
