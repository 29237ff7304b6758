"""What CHANGES says, with which kernels are compiled for changes of scores.

It is 0 if scores are only scaled and masked, and then nothing of them is compiled. Otherwise it is the sum of CHANGED
and of the bits below; further changes are those whose pointers are not None.
"""

import triton.language as tl

CHANGED = tl.constexpr(1)
CAPPED = tl.constexpr(2)
LOGARITHMIC = tl.constexpr(4)  # the decay with distance
HARDWARE_TANH = tl.constexpr(8)  # with a relative error of 2^-11, no more than rounding to half precision makes
COMPILED = tl.constexpr(16)  # not interpreted, so instructions may be written
