"""Matrix products in Triton's interpreter: summed in fp64 and rounded once, in place of its `create_dot`.

The interpreter multiplies by BLAS, whose sums of x y^T and of y x^T differ in their last bits. The kernels rely on
matrix units, which form the same products in the same order, whichever operand comes first. `tensor_cores.py` has the
rounding of their sums.
"""

import numpy as np


def summed_alike_in_either_order(builder, a, b, d, *options):
    with np.errstate(over="ignore", invalid="ignore"):  # as in fp32
        product = (a.data.astype(np.float64) @ b.data.astype(np.float64)).astype(d.data.dtype)
        return type(d)(product + d.data, d.dtype.scalar)
