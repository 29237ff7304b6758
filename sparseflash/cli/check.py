"""Is attention under a mask exact on this machine? Against dense attention in fp64, by the library's yardstick."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from sparseflash import BlockMask, attention
from sparseflash.attention import Backend
from sparseflash.cli.inputs import Inputs, drawn
from sparseflash.testing import error_in_yardsticks, largest_error

NAMES = ("out", "lse", "dq", "dk", "dv")
SCORES_AT_ONCE = 2**25  # 256 MiB in fp64, of which an operation holds several
_FEW = 2**22  # scores: so many are computed for several draws


def errors(
    mask: BlockMask,
    *,
    heads: int,
    kv_heads: int | None,
    dim: int,
    dtype: torch.dtype,
    backend: Backend | None,
    seed: int,
) -> dict[str, float]:
    """The error of each result, in units of what is allowed: at most 1 is exact.

    Allowed is twice the error of the plain implementation in the same precision, and about one unit in the last place.
    """

    def draw(number: int) -> Inputs:
        return drawn(mask, batch=1, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, seed=seed + number)

    inputs = draw(0)
    truth = plain(inputs.to(torch.float64), mask)
    got = results(inputs, mask, backend)
    sticks = [largest_error(x, exact) for x, exact in zip(plain(inputs, mask), truth)]
    # One draw of few values would be a yardstick of random length: a plain result is sometimes right to the last bit.
    queries = inputs.q[..., 0].numel()
    for number in range(1, 16 if queries < 256 else 4 if queries * mask.k_len <= _FEW else 1):
        other = draw(number)
        pairs = zip(plain(other, mask), plain(other.to(torch.float64), mask))
        sticks = [max(stick, largest_error(x, exact)) for stick, (x, exact) in zip(sticks, pairs)]
    sizes = [largest_score(inputs) if name == "lse" else 0.0 for name in NAMES]
    rows = zip(NAMES, got, truth, sticks, sizes)
    return {name: error_in_yardsticks(x, exact, stick, size) for name, x, exact, stick, size in rows}


def results(inputs: Inputs, mask: BlockMask, backend: Backend | None) -> list[Tensor]:
    """What NAMES says, of one call and its backward pass."""
    leaves = inputs.leaves()
    out, lse = attention(*leaves, mask, return_lse=True, backend=backend)
    gradients = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse.to(lse.dtype)))
    return [out.detach(), lse.detach(), *gradients]


def plain(inputs: Inputs, mask: BlockMask) -> list[Tensor]:
    """The same by the definition, dense, some rows at a time; gradients of keys and values are summed in fp64."""
    step = max(1, rows_at_once(inputs) // mask.block_q) * mask.block_q  # whole blocks are cropped without shifting bits
    outs, lses, dqs = [], [], []
    dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (inputs.k, inputs.v))
    for first in range(0, mask.q_len, step):
        rows = slice(first, min(first + step, mask.q_len))
        part = Inputs(inputs.q[:, :, rows], inputs.k, inputs.v, inputs.dout[:, :, rows], inputs.dlse[:, :, rows])
        out, lse, *gradients = results(part, mask.crop(q=(rows.start, rows.stop)), "reference")
        outs.append(out)
        lses.append(lse)
        dqs.append(gradients[0])
        dk += gradients[1]
        dv += gradients[2]
    return [*(torch.cat(parts, dim=2) for parts in (outs, lses, dqs)), dk.to(inputs.k.dtype), dv.to(inputs.v.dtype)]


def largest_score(inputs: Inputs) -> float:
    """The largest sum of absolute products that makes a score: the size of the numbers that lse is computed from."""
    q, k = inputs.q.double().abs(), inputs.k.double().abs().repeat_interleave(inputs.q.shape[1] // inputs.k.shape[1], 1)
    largest = 0.0
    for part in q.split(rows_at_once(inputs), dim=2):
        largest = max(largest, float((part @ k.mT).max()))
    return largest / sqrt(inputs.q.shape[-1])


def rows_at_once(inputs: Inputs) -> int:
    """How many queries' scores are computed together."""
    return max(1, SCORES_AT_ONCE // (inputs.q.shape[0] * inputs.q.shape[1] * max(1, inputs.k.shape[2])))
