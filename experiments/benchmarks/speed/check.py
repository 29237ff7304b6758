"""Checks results: forward and gradients on the inputs of the run are compared with dense attention in fp64.

Some heads are compared: all rows of the output and the gradients if a head has at most a billion live scores, otherwise
the rows of some query blocks and key blocks (`part`). All other values must be finite. The scores are computed for a
few block rows at a time and only on the live key blocks of those rows, so memory is bounded and sparse masks are cheap.
The yardstick is a plain PyTorch implementation in the dtype of the inputs under the same mask: an error may be twice
its error, plus one unit in the last place of the largest reference value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from experiments.benchmarks.speed.patterns import Pattern
from experiments.benchmarks.speed.peers.runner import Inputs
from sparseflash.testing import Part, error_of, sampled_heads, sampled_part

NAMES = ("out", "dq", "dk", "dv")
SCORES_AT_ONCE = 2**25  # 256 MiB of fp64
LIVE_SCORES_IN_FULL = 2**30  # per head: 0.2 s on an H100
checked_heads = sampled_heads


def part(pattern: Pattern, *, limit: int = LIVE_SCORES_IN_FULL, blocks: int = 16, seed: int = 0) -> Part:
    """The part of a head to compare: all of it up to `limit` live scores, above that `sampled_part` with `blocks`
    blocks.
    """
    layout = pattern.full | pattern.partial
    every = torch.ones(len(layout), dtype=torch.bool, device=layout.device)
    if pattern.kept <= limit:
        return Part(every, every, pattern.block, pattern.block)
    return sampled_part(layout, pattern.block, pattern.block, blocks=blocks, seed=seed)


def _chunks(pattern: Pattern, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The query rows in chunks of whole blocks: their positions int64 [R], and the positions [C] of their live keys.

    `rows`: bool [M], the block rows to take, all if None. A chunk has about 1024 rows, fewer if it would hold more than
    SCORES_AT_ONCE scores.
    """
    layout, block = pattern.full | pattern.partial, pattern.block
    positions = torch.arange(pattern.length, device=layout.device).view(-1, block)
    wanted = torch.arange(len(layout), device=layout.device) if rows is None else rows.nonzero()[:, 0]
    begin = 0
    while begin < len(wanted):
        count = max(1, 1024 // block)
        columns = positions[layout[wanted[begin : begin + count]].any(0)]
        while count > 1 and count * block * columns.numel() > SCORES_AT_ONCE:
            count //= 2
            columns = positions[layout[wanted[begin : begin + count]].any(0)]
        yield positions[wanted[begin : begin + count]].reshape(-1), columns.reshape(-1)
        begin += count


def plain_attention(
    head: Sequence[Tensor], pattern: Pattern, dtype: torch.dtype, rows: Tensor | None = None
) -> dict[str, Tensor]:
    """Output and gradients of one head in plain PyTorch: softmax(q k^T / sqrt(D) on live scores) v.

    `head`: q, k, v and the gradient of the output, [N, D] each. All arithmetic is in `dtype`, rounded after every
    operation, but gradients of keys and values are summed over the row chunks in at least fp32, which is how they are
    returned. Every row must have a live key. Returns NAMES -> [N, D]; `rows`: bool [M], the block rows to compute, all
    if None; the outputs of other rows are undefined, and their contributions to the gradients are missing.
    """
    q, k, v, dout = (tensor.detach().to(dtype) for tensor in head)
    sum_dtype = torch.promote_types(dtype, torch.float32)
    out, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = torch.zeros_like(k, dtype=sum_dtype), torch.zeros_like(v, dtype=sum_dtype)
    for chosen, columns in _chunks(pattern, rows):
        live = pattern.live(chosen[:, None], columns[None, :])  # [R, C]
        q_rows, k_live, v_live = (t.requires_grad_() for t in (q[chosen], k[columns], v[columns]))
        with torch.enable_grad():
            scores = (q_rows @ k_live.mT) * q.shape[-1] ** -0.5
            out_rows = torch.softmax(scores.masked_fill(~live, float("-inf")), dim=-1) @ v_live
        gradients = torch.autograd.grad(out_rows, (q_rows, k_live, v_live), dout[chosen])
        out[chosen], dq[chosen] = out_rows.detach(), gradients[0]
        dk[columns] += gradients[1].to(sum_dtype)
        dv[columns] += gradients[2].to(sum_dtype)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def error_ratio(result: Tensor, plain: Tensor, truth: Tensor) -> float:
    """The error of `result` over the yardstick, the worse of the largest and the root-mean-square one; at
    most 1 is right.

    Infinite if the result or the yardstick is not finite.
    """
    return error_of(result, truth, plain, rms=True).ratio


def _plain_group(
    inputs: Inputs, b: int, kv_head: int, pattern: Pattern, dtype: torch.dtype, rows: Tensor | None
) -> dict[str, Tensor]:
    """`plain_attention` of the query heads of one key head: out and dq [G, N, D], dk and dv [N, D], in `dtype`."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    heads: list[dict[str, Tensor]] = []
    for h in range(kv_head * group, (kv_head + 1) * group):
        head = (inputs.q[b, h], inputs.k[b, kv_head], inputs.v[b, kv_head], inputs.dout[b, h])
        heads.append(plain_attention(head, pattern, dtype, rows))
    summed = {name: sum(head[name] for head in heads[1:]) + heads[0][name] for name in ("dk", "dv")}
    stacked = {name: torch.stack([head[name] for head in heads]) for name in ("out", "dq")}
    return {name: tensor.to(dtype) for name, tensor in (stacked | summed).items()}


def error_ratios(
    results: Mapping[str, Tensor],
    inputs: Inputs,
    pattern: Pattern,
    heads: Sequence[tuple[int, int]],
    compared: Part | None = None,
) -> dict[str, float]:
    """The worst `error_ratio` over `heads`, pairs (batch, head of k and v), of each entry of `results`.

    results: some of NAMES -> [B, H, N, D]; "inference" is one more output. `compared`: the part of each head to
    compare, all of it if None. Infinite if any element of a result, compared or not, is not finite.
    """
    worst = dict.fromkeys(results, 0.0)
    rows = None if compared is None or compared.whole else compared.rows
    group = inputs.q.shape[1] // inputs.k.shape[1]
    for b, h in heads:
        truth = _plain_group(inputs, b, h, pattern, torch.float64, rows)
        plain = _plain_group(inputs, b, h, pattern, inputs.q.dtype, rows)
        for name, result in results.items():
            key = "out" if name == "inference" else name
            mine = result[b, h].detach() if key in ("dk", "dv") else result[b, h * group : (h + 1) * group].detach()
            three = (mine, plain[key], truth[key])
            if rows is not None:
                assert compared is not None
                tokens = compared.tokens(key)
                three = tuple(tensor[..., tokens, :] for tensor in three)
            worst[name] = max(worst[name], error_ratio(*three))
    for name, result in results.items():
        if not bool(torch.isfinite(result).all()):
            worst[name] = math.inf
    return worst


def poison(like: Tensor, count: int) -> None:
    """Leaves NaN in freed buffers of the size of `like`, so that values that a kernel fails to write are noticed."""
    buffers = [torch.full_like(like, float("nan"), dtype=torch.float32) for _ in range(count)]
    buffers += [torch.full_like(like, float("nan")) for _ in range(count)]
    del buffers
