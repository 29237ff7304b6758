"""Bits of the Hopper kernels' CHANGES."""

import triton.language as tl

CAPPED = tl.constexpr(2)
LOGARITHMIC = tl.constexpr(4)  # the decay with distance
