"""Loads and stores of gradients, for both kernels of the backward."""

import triton
import triton.language as tl

from sparseflash.backends.triton.device_functions.loads import store_tokens


@triton.jit
def lse_gradients(pointers, inside, inverse, AXIS: tl.constexpr):
    """The gradients of lse for a tile's queries, expanded along AXIS to broadcast with scores; 0 for queries without
    keys, even if the gradient there is NaN.
    """
    return tl.where(inverse > 0.0, tl.expand_dims(tl.load(pointers, mask=inside, other=0.0), AXIS), 0.0)


@triton.jit
def write_gradients(
    dx, dx_ptr, factor, batch, head, first, tokens, length, strides,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TOKENS: tl.constexpr, SCALED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Writes a complete gradient, times `factor` if SCALED; if CUT, 0 for tokens at or past `length`."""
    if SCALED:
        dx = dx * factor
    if CUT:
        dx = tl.where((first + tl.arange(0, TOKENS) < length)[:, None], dx, 0.0)
    store_tokens(dx_ptr, dx.to(dx_ptr.dtype.element_ty), batch, head, first, tokens, strides, DIM, PADDED_DIM, TOKENS)
