"""Is the result right? Forward and gradients on the run's own inputs against dense attention in fp64.

Some heads are compared in full: every output row, every gradient row. The scores are computed a few block
rows at a time and on the live key blocks of those rows only, so memory is bounded and a sparse mask is cheap.
The yardstick is a plain PyTorch implementation in the dtype of the inputs under the same mask: an error may
be twice its error, plus one unit in the last place of the largest reference value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from experiments.speed.patterns import Pattern
from experiments.speed.peers.runner import Inputs

NAMES = ("out", "dq", "dk", "dv")
SCORES_AT_ONCE = 2**25  # 256 MiB of fp64
# A peer counts as computing the same function when it differs from ours, verified, by less than this
# (Frobenius norms). Rounding stays well below; a wrong mask or a wrong scale does not.
SAME_FUNCTION = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 3e-3, torch.float64: 1e-6}


def _chunks(pattern: Pattern) -> Iterator[tuple[slice, Tensor]]:
    """The query rows in chunks of whole blocks, each with the positions int64 [C] of the key blocks live in
    it.

    A chunk has about 1024 rows, fewer where it would hold more than SCORES_AT_ONCE scores.
    """
    layout, block = pattern.full | pattern.partial, pattern.block
    positions = torch.arange(pattern.length, device=layout.device).view(-1, block)
    begin, blocks = 0, len(layout)
    while begin < blocks:
        count = max(1, 1024 // block)
        columns = positions[layout[begin : begin + count].any(0)]
        while count > 1 and count * block * columns.numel() > SCORES_AT_ONCE:
            count //= 2
            columns = positions[layout[begin : begin + count].any(0)]
        yield slice(begin * block, min(begin + count, blocks) * block), columns.reshape(-1)
        begin += count


def plain_attention(head: Sequence[Tensor], pattern: Pattern, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of one head in plain PyTorch: softmax(q k^T / sqrt(D) on live scores) v.

    `head`: q, k, v and the gradient of the output, [N, D] each. All arithmetic is in `dtype`, rounded after
    every operation, but gradients of keys and values are summed over the row chunks in at least fp32. Every
    row must have a live key. Returns NAMES -> [N, D] in `dtype`.
    """
    q, k, v, dout = (tensor.detach().to(dtype) for tensor in head)
    sum_dtype = torch.promote_types(dtype, torch.float32)
    out, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = torch.zeros_like(k, dtype=sum_dtype), torch.zeros_like(v, dtype=sum_dtype)
    positions = torch.arange(pattern.length, device=q.device)
    for chosen, columns in _chunks(pattern):
        live = pattern.live(positions[chosen, None], columns[None, :])  # [R, C]
        q_rows, k_live, v_live = (t.requires_grad_() for t in (q[chosen].clone(), k[columns], v[columns]))
        with torch.enable_grad():
            scores = (q_rows @ k_live.mT) * q.shape[-1] ** -0.5
            out_rows = torch.softmax(scores.masked_fill(~live, float("-inf")), dim=-1) @ v_live
        gradients = torch.autograd.grad(out_rows, (q_rows, k_live, v_live), dout[chosen])
        out[chosen], dq[chosen] = out_rows.detach(), gradients[0]
        dk[columns] += gradients[1].to(sum_dtype)
        dv[columns] += gradients[2].to(sum_dtype)
    return {"out": out, "dq": dq, "dk": dk.to(dtype), "dv": dv.to(dtype)}


def error_ratio(result: Tensor, plain: Tensor, truth: Tensor) -> float:
    """The error of `result` over the yardstick, the worse of the largest and the root-mean-square one; at
    most 1 is right.

    NaN where the result or the yardstick is not finite.
    """
    unit = torch.finfo(plain.dtype).eps
    error, plain_error = (result.double() - truth).abs(), (plain.double() - truth).abs()
    largest = error.max() / (2 * plain_error.max() + unit * truth.abs().max())
    rms = error.square().mean().sqrt() / (2 * plain_error.square().mean().sqrt() + unit * truth.square().mean().sqrt())
    return float(torch.maximum(largest, rms))  # maximum, unlike max(), keeps a NaN


def error_ratios(
    results: Mapping[str, Tensor], inputs: Inputs, pattern: Pattern, heads: Sequence[tuple[int, int]]
) -> dict[str, float]:
    """The worst `error_ratio` over `heads`, pairs (batch, head), of each entry of `results`.

    results: some of NAMES -> [B, H, N, D]; "inference" is one more output.
    """
    worst = dict.fromkeys(results, 0.0)
    for b, h in heads:
        head = [tensor[b, h] for tensor in (inputs.q, inputs.k, inputs.v, inputs.dout)]
        truth = plain_attention(head, pattern, torch.float64)
        plain = plain_attention(head, pattern, inputs.q.dtype)
        for name, result in results.items():
            key = "out" if name == "inference" else name
            ratio = error_ratio(result[b, h].detach(), plain[key], truth[key])
            if ratio > worst[name] or math.isnan(ratio):  # once NaN, NaN to the end
                worst[name] = ratio
    return worst


def checked_heads(batch: int, heads: int, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """`count` pairs (batch, head): the first, the last, and others drawn; all if there are no more."""
    total = batch * heads
    generator = torch.Generator().manual_seed(seed)
    between = (torch.randperm(max(total - 2, 0), generator=generator) + 1).tolist()
    chosen = [0, total - 1, *between][: max(1, count)] if total > 1 else [0]
    return [divmod(index, heads) for index in chosen]


def difference(result: Tensor, ours: Tensor) -> float:
    """||result - ours|| / ||ours||, in Frobenius norms."""
    return float((result.float() - ours.float()).norm() / ours.float().norm())


def poison(like: Tensor, count: int) -> None:
    """Leaves NaN in freed buffers of the size of `like`: what a kernel does not write then shows."""
    buffers = [torch.full_like(like, float("nan"), dtype=torch.float32) for _ in range(count)]
    buffers += [torch.full_like(like, float("nan")) for _ in range(count)]
    del buffers
