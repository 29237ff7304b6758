"""Floating-point operations of attention with a mask: of the live scores, of whole tiles, and as run by the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparseflash.analysis.heads import dims, repeats
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import check_floating, flag
from sparseflash.blockmask.walks import walks

_FORWARD = 1, 1  # S = Q K^T; O = P V
_BACKWARD = 3, 2  # S again, dQ = dS K, dK = dS^T Q; dP = dO V^T, dV = P^T dO
_BACKWARD_TWO_PASSES = 4, 3  # dK and dV by columns and dQ by rows, each computing S and dP
_BACKWARD_THREE_PASSES = 5, 4  # in fp32 a third pass computes both again for delta


@dataclass(frozen=True)
class Flops:
    """Floating-point operations (a multiplication and an addition count as two) of one pass over all heads.

    >>> print(Flops(useful=8_000_000, computed=10_000_000, performed=10_000_000))
    8e+06 useful FLOPs, 1e+07 in live tiles (80 % useful), 1e+07 performed by the kernels

    `useful`: for the live scores. `computed`: for every score of the live tiles. `performed`: by sparseflash's Triton
    kernels, with head dims padded to a power of two and the backward's recomputed products.
    """

    useful: int
    computed: int
    performed: int

    @property
    def efficiency(self) -> float:
        """Useful over computed operations; 1.0 if nothing is computed."""
        return self.useful / self.computed if self.computed else 1.0

    def __str__(self) -> str:
        return (
            f"{self.useful:.3g} useful FLOPs, {self.computed:.3g} in live tiles "
            f"({100 * self.efficiency:.3g} % useful), {self.performed:.3g} performed by the kernels"
        )


def flops(
    mask: BlockMask,
    head_dim: int,
    v_dim: int | None = None,
    *,
    backward: bool = False,
    batch: int | None = None,
    heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Flops:
    """The matrix-product operations of one forward or backward pass.

    >>> mask = BlockMask.from_function(lambda q, k: k <= q, 256, block=64)
    >>> flops(mask, 64)
    Flops(useful=8421376, computed=10485760, performed=10485760)
    >>> print(flops(mask, 64, backward=True, batch=2, heads=8))
    3.37e+08 useful FLOPs, 4.19e+08 in live tiles (80.3 % useful), 5.87e+08 performed by the kernels

    With D = head_dim and Dv = v_dim, each score takes

        forward    2 (D + Dv):     S = Q K^T, O = P V
        backward   2 (3 D + 2 Dv): S again, dP = dO V^T, dV = P^T dO, dQ = dS K, dK = dS^T Q

    For D = Dv this is `4 D`, and 2.5 times as much, as FlashAttention counts (Dao, 2023, section 4.1).

    sparseflash's backward computes dK and dV in one pass and dQ in another, each with its own S and dP: seven products,
    `2 (4 D + 3 Dv)`; in fp32 a third pass for delta makes it nine, `2 (5 D + 4 Dv)`. Only `performed` counts these.

    Args:
        head_dim, v_dim: D and Dv; Dv is D by default.
        backward: count the backward pass, not the forward pass.
        batch, heads: of the attention, by default the mask's.

    Scores past a sequence's length are not useful; tiles that begin past it are not computed. Raises ValueError if a
    dim is not positive, or if the mask does not fit the number of heads or batch elements.
    """
    head_dim, v_dim = dims(head_dim, v_dim)
    backward = flag(backward, "backward")
    check_floating(dtype)
    times = repeats(mask, batch, heads)
    live = tiles = 0
    for walk in walks(mask):
        live += times * len(walk.users) * int(walk.live().sum())
        tiles += times * len(walk.users) * len(walk.rows)
    of_d, of_dv = _BACKWARD if backward else _FORWARD
    a_score = 2 * (of_d * head_dim + of_dv * v_dim)
    if backward:
        of_d, of_dv = _BACKWARD_THREE_PASSES if dtype == torch.float32 else _BACKWARD_TWO_PASSES
    performed = 2 * (of_d * _padded(head_dim) + of_dv * _padded(v_dim))
    in_tiles = tiles * mask.block_q * mask.block_k
    return Flops(useful=a_score * live, computed=a_score * in_tiles, performed=performed * in_tiles)


def _padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())
