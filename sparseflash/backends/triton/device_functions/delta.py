"""delta in full fp32: a mean under the recomputed weights, computed with their inverse sums; see `dq_kernel`."""

import triton
import triton.language as tl

from sparseflash.backends.triton.device_functions.softmax import add_exactly


@triton.jit
def means_step(delta, weight, lost, exps, p, dp, estimate):
    """Adds one tile of keys to the sums that `write_means` computes delta from. estimate: rowsum(out * dout)."""
    weight, lost = add_exactly(weight, lost, tl.sum(exps, 1))
    return delta + tl.sum(p * (dp - estimate[:, None]), 1), weight, lost


@triton.jit
def write_means(delta, weight, estimate, inverse, delta_ptr, own_inverse_ptr, at, inside):
    """Writes delta and the inverse sum of exponentials, after all keys have been added."""
    weight = tl.where((inverse > 0.0) & (weight > 0.0), weight, 1.0)
    tl.store(delta_ptr + at, estimate + tl.div_rn(delta, tl.where(inverse > 0.0, weight * inverse, 1.0)), mask=inside)
    own_inverse = tl.where(inverse > 0.0, tl.div_rn(tl.full(weight.shape, 1.0, tl.float32), weight), 0.0)
    tl.store(own_inverse_ptr + at, own_inverse, mask=inside)
