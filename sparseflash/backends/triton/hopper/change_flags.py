"""Bits of the CHANGES of the Hopper backward."""

import triton.language as tl

CAPPED = tl.constexpr(2)
LOGARITHMIC = tl.constexpr(4)  # the decay with distance
