"""Queries travel to the ranks that hold their keys, and partial results travel back: for few queries and many keys.

Queries are exchanged as keys are under the transposed mask, and then the results. A rank attends with its own and the
received queries to its own keys. The owner merges the parts by their lse: its own first, then by rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sparseflash.blockmask import BlockMask
from sparseflash.distributed.exchange import NO_SECOND, Transfers, flat
from sparseflash.distributed.planner import Assignment
from sparseflash.distributed.routes import Heads, Readers
from sparseflash.distributed.stages import Route, stages_of
from sparseflash.first_derivatives import first_derivatives


def turned(assignment: Assignment) -> Assignment:
    """The assignment of the transposed mask."""
    return Assignment(assignment.keys, assignment.queries, assignment.name)


def query_stages(
    mask: BlockMask, assignment: Assignment, readers: Readers, rank: int, heads: Heads, *, same_slots: bool
) -> Route:
    """The attention of local queries, and of received queries, to local keys."""
    route = stages_of(mask, turned(assignment), readers, rank, heads, 1, same_slots=same_slots)
    return Route([replace(stage, mask=stage.mask.transpose()) for stage in route.stages])


def merged_with_remote(
    out: Tensor, lse: Tensor, remote_out: Tensor, remote_lse: Tensor, transfers: Transfers
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of this rank's queries, merged from the local part and the parts of other ranks.

    `out [B, Hq, n, Dv]`, `lse [B, Hq, n]`: local; `remote_out [B, Hq, slots, Dv]`, `remote_lse`: of the received
    queries, which are sent back.
    """
    out_rows, lse_rows = _Return.apply(transfers, remote_out, remote_lse)  # type: ignore[no-untyped-call]
    merged_out, merged_lse = _MergeRows.apply(transfers, out, lse, out_rows, lse_rows)  # type: ignore[no-untyped-call]
    return merged_out, merged_lse


class _Return(Function):
    @staticmethod
    def forward(ctx: Any, transfers: Transfers, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        ctx.transfers, ctx.shape = transfers, out.shape
        stage = transfers.route.exchanging[0]
        (outs, lses), wait = transfers.start([flat(out), lse.reshape(-1, 1)], stage, back=True)
        wait()
        return outs, lses.squeeze(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        transfers, shape = ctx.transfers, ctx.shape
        stage = transfers.route.exchanging[0]

        def returned(dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
            received, wait = transfers.start([dout, dlse.unsqueeze(1)], stage, packed=True)
            wait()
            out, lse = (stage.received.placed(x, shape[:-1].numel()) for x in received)
            return out.view(shape), lse.view(shape[:-1])

        return None, *first_derivatives(NO_SECOND, returned, *gradients)


class _MergeRows(Function):
    @staticmethod
    def forward(
        ctx: Any, transfers: Transfers, out: Tensor, lse: Tensor, out_rows: Tensor, lse_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.transfers = transfers
        ctx.save_for_backward(out, lse, out_rows, lse_rows)
        merged_out, merged_lse, _, _ = _merge(transfers, out, lse, out_rows, lse_rows)
        return merged_out.to(out.dtype), merged_lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        transfers: Transfers = ctx.transfers
        out, lse, out_rows, lse_rows = ctx.saved_tensors
        merged_out, merged_lse, share, shares = _merge(transfers, out, lse, out_rows, lse_rows)
        dout, dlse = gradients[0], gradients[1].masked_fill(merged_lse == -torch.inf, 0.0)
        rows = transfers.route.exchanging[0].sent.on(out.device)

        def part(weight: Tensor, dout: Tensor, dlse: Tensor, difference: Tensor) -> tuple[Tensor, Tensor]:
            return (weight.unsqueeze(-1) * dout).to(out.dtype), weight * ((dout * difference).sum(-1) + dlse)

        width = out.shape[-1]
        taken = (x.reshape(-1, width).index_select(0, rows) for x in (dout, merged_out))
        dout_rows, merged_rows = taken
        dlse_rows = dlse.reshape(-1).index_select(0, rows)
        return (
            None,
            *part(share, dout, dlse, out - merged_out),
            *part(torch.cat(shares), dout_rows, dlse_rows, out_rows - merged_rows),
        )


def _merge(
    transfers: Transfers, out: Tensor, lse: Tensor, out_rows: Tensor, lse_rows: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """`(out, lse)` in fp32 or fp64, the share of the local part, and the shares of the rows of each rank."""
    sent = transfers.route.exchanging[0].sent
    rows = sent.on(out.device).split(sent.counts)
    lses, outs = lse_rows.split(sent.counts), out_rows.split(sent.counts)
    highest = lse.reshape(-1).clone()
    for some, values in zip(rows, lses, strict=True):
        highest[some] = torch.maximum(highest[some], values)
    safe = highest.masked_fill(highest == -torch.inf, 0.0)
    share = torch.exp(lse.reshape(-1) - safe)
    shares = [torch.exp(values - safe[some]) for some, values in zip(rows, lses, strict=True)]
    total = share.clone()
    for some, values in zip(rows, shares, strict=True):
        total[some] += values
    divisor = total.masked_fill(total == 0, 1.0)
    share = share / divisor
    shares = [values / divisor[some] for some, values in zip(rows, shares, strict=True)]
    merged = share.unsqueeze(-1) * out.reshape(len(share), -1)
    for some, weight, values in zip(rows, shares, outs, strict=True):
        merged[some] += weight.unsqueeze(-1) * values
    return merged.view(out.shape), (safe + torch.log(total)).view(lse.shape), share.view(lse.shape), shares
