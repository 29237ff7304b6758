"""Arithmetic functions that Triton lacks, as PyTorch defines them."""

import triton
import triton.language as tl


@triton.jit
def floor_divide(x, y):
    """The quotient of integers, rounded down; Triton's `//` rounds towards zero."""
    quotient = x // y
    rest = x - quotient * y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), quotient - 1, quotient)


@triton.jit
def float_remainder(x, y):
    """`x - floor(x / y) * y` of floats, exactly: just below a multiple of y it is just below y, not 0."""
    x, y = tl.cast(x, tl.float64), tl.cast(y, tl.float64)
    rest = x - tl.floor(x / y) * y
    rest = tl.where((rest != 0.0) & ((rest < 0.0) != (y < 0.0)), rest + y, rest)  # the quotient was rounded up
    return tl.where(tl.abs(rest) >= tl.abs(y), rest - y, rest).to(tl.float32)


@triton.jit
def product(gradient, slope):
    """The product, and 0 where the gradient is 0: dead scores have gradient 0, but their slope need not be finite."""
    return tl.where(gradient == 0.0, 0.0, gradient * slope)


@triton.jit
def sign(x):
    """-1, 0 or 1."""
    return tl.where(x > 0, 1.0, 0.0) - tl.where(x < 0, 1.0, 0.0)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1.0 + small)


@triton.jit
def log1p(x):
    """log(1 + x). A factor corrects the rounding of 1 + x."""
    one_more = 1.0 + x
    apart = one_more - 1.0
    return tl.where(apart == 0.0, x, tl.log(one_more) * x / tl.where(apart == 0.0, 1.0, apart))
