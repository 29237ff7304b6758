"""A cost model of a case: bytes moved between HBM and on-chip memory, and operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from experiments.benchmarks.io.cases import STANDARD, Case
from sparseflash import BlockMask
from sparseflash.analysis import bytes_moved, flops

_FP32 = 4  # bytes


@dataclass(frozen=True)
class Cost:
    """The cost of a forward and of a backward: FLOPs as the implementation performs them, bytes without any cache."""

    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int

    @property
    def flops(self) -> int:
        """Forward and backward together."""
        return self.forward_flops + self.backward_flops

    @property
    def bytes(self) -> int:
        """Forward and backward together."""
        return self.forward_bytes + self.backward_bytes


def cost(case: Case, held: int = 64) -> Cost:
    """The cost if a program holds this many queries (forward, dq) or keys (dk, dv), or a block if that is smaller.

    Ours forward: `sparseflash.analysis.bytes_moved`. Backward, with e bytes per number, N, D and s as there, and m
    queries or keys held:

        delta       out, dout read, delta and lse written and read   2 e N D + 12 N
        dk, dv      k, v read, dk, dv written                        4 e N D
                    q, dout, lse, delta read for each live tile      (2 e D + 8) s N^2 / m
        dq          q, dout read, dq written                         3 e N D + 8 N
                    k, v read for each live tile                     2 e D s N^2 / m

    Standard attention writes its matrices out. Forward: write S, read S, write P, read P: `4 e N^2`. Backward: read P
    for dV, write dP, read P and dP, write dS, read dS for dQ and again for dK: `7 e N^2`; and q, k, v, out, dout and
    the gradients once for each product in which they occur.
    """
    mask, e = case.mask(), torch.empty(0, dtype=case.dtype).element_size()
    heads, n, d = case.batch * case.heads, case.length, case.head_dim
    if case.kind == STANDARD:
        product = 2 * n * n * d * heads
        return Cost(2 * product, 4 * product, heads * e * (4 * n * d + 4 * n * n), heads * e * (8 * n * d + 7 * n * n))
    held = min(held, case.block)
    moved = bytes_moved(mask, d, dtype=case.dtype, tile_queries=held, batch=case.batch, heads=case.heads)
    live = live_scores(mask) * heads
    once = heads * (9 * e * n * d + 20 * n)
    again = (4 * e * d + 2 * _FP32) * live // held
    performed = [
        flops(mask, d, backward=backward, batch=case.batch, heads=case.heads, dtype=case.dtype).performed
        for backward in (False, True)
    ]
    return Cost(*performed, moved.total, once + again)


def live_scores(mask: BlockMask) -> int:
    """Scores in the live tiles of one head."""
    return len(mask.indices) * mask.block_q * mask.block_k
