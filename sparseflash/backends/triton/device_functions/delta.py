"""delta in full fp32: a mean under the recomputed weights, computed with their inverse sums; see `portable/dq.py`."""

import triton
import triton.language as tl

from sparseflash.backends.triton.device_functions.loads import part_pointers
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


@triton.jit
def write_part_of_means(delta, weight, estimate, parts_ptr, part, BLOCK_M: tl.constexpr):
    """Writes the sums over the keys of a chunk, for `combine_means_kernel`."""
    SIZE: tl.constexpr = 3 * BLOCK_M
    tl.store(part_pointers(parts_ptr, part, SIZE, 0, BLOCK_M, 1), delta[:, None])
    tl.store(part_pointers(parts_ptr, part, SIZE, BLOCK_M, BLOCK_M, 1), weight[:, None])
    tl.store(part_pointers(parts_ptr, part, SIZE, 2 * BLOCK_M, BLOCK_M, 1), estimate[:, None])
