"""Matrix products for Triton's interpreter, in place of its `InterpreterBuilder.create_dot`.

BLAS sums x y^T and y x^T differently. The kernels rely on matrix units, which form the same products in the same order.
"""

import numpy as np


def summed_alike_in_either_order(builder, a, b, d, *options):
    """Summed in fp64 and rounded once."""
    with np.errstate(over="ignore", invalid="ignore"):
        product = (a.data.astype(np.float64) @ b.data.astype(np.float64)).astype(d.data.dtype)
        return type(d)(product + d.data, d.dtype.scalar)


def summed_as_by_tensor_cores(builder, a, b, d, *options):
    """As tensor cores: 16 products at a time, and bits that do not fit are cut off."""
    total = d.data
    for i in range(0, a.data.shape[-1], 16):
        exact = total.astype("f8") + a.data[:, i : i + 16].astype("f8") @ b.data[i : i + 16].astype("f8")
        rounded = exact.astype("f4")
        total = np.where(abs(rounded) > abs(exact), np.nextafter(rounded, np.float32(0)), rounded)
    return type(d)(total, d.dtype.scalar)
