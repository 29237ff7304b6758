"""Keys and values travel to the ranks that read them, or queries to keys, and their gradients travel back.

The exchanges of all stages are started together and each is waited for when its keys are needed, so that they overlap
with attention to what is there already. Backward runs the stages in reverse order: as soon as the attention of a stage
has its gradients they are sent back, while earlier stages, the local one last, are still being computed. Each owner
then adds what came back in the order of the ranks, in fp32, whatever arrived first.

Or there is one stage, whose attention waits for all keys and needs no merge (`Stage.local`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from sparseflash.distributed.routes import Rows, Stage


@dataclass(eq=False)
class Sent:
    """What a rank has sent to other ranks, counted where it is sent.

    >>> Sent().bytes
    0
    """

    bytes: int = 0
    messages: int = 0

    def count(self, size: int, counts: list[int]) -> None:
        """Adds one exchange of so many bytes with other ranks; `counts`: rows for each rank, 0 for the own one."""
        self.bytes += size
        self.messages += sum(each > 0 for each in counts)


@dataclass(eq=False)
class Transfers:
    """One call's exchanges under way: the stages that exchange something, the group, and what has been started."""

    stages: list[Stage]
    group: dist.ProcessGroup
    rank: int
    sent: Sent
    works: dict[Stage, list[Any]] = field(default_factory=dict)
    returned: dict[Stage, list[tuple[Tensor, Any]]] = field(default_factory=dict)

    def start(self, data: Tensor, outgoing: Rows, incoming: Rows) -> tuple[Tensor, Any]:
        """Starts sending the rows of `data`: `(rows that will come, the operation)`."""
        data = data.contiguous()
        received = data.new_empty((sum(incoming.counts), data.shape[1]))
        self.sent.count(data.numel() * data.element_size(), outgoing.counts)
        # As bytes, so that every backend of torch.distributed takes every dtype.
        work = dist.all_to_all_single(
            received.view(torch.uint8), data.view(torch.uint8), incoming.counts, outgoing.counts,
            group=self.group, async_op=True,
        )  # fmt: skip
        return received, (work, data)  # the data must live until they are sent


def exchanged(tensors: Sequence[Tensor], transfers: Transfers) -> tuple[list[Tensor], dict[Stage, list[Tensor]]]:
    """Starts all exchanges of tensors `[B, H, n, D]`: `(the local tensors, the pending ones of each stage)`.

    Use the local tensors that are returned: their gradients are summed with those that come back.
    """
    found = _Start.apply(transfers, *tensors)  # type: ignore[no-untyped-call]
    count = len(tensors)
    pending = {
        stage: list(found[count * number : count * (number + 1)]) for number, stage in enumerate(transfers.stages, 1)
    }
    return list(found[:count]), pending


def arrived(pending: Sequence[Tensor], stage: Stage, transfers: Transfers, local: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a stage, `[B, H, slots, D]` each, once they have come; unused slots are 0. `local`: those of this
    rank.
    """
    shapes = [x.shape for x in local]
    own = local if stage.local else ()
    return list(_Arrive.apply(transfers, stage, shapes, *pending, *own))  # type: ignore[no-untyped-call]


def for_each_stage(q: Tensor, stages: int) -> list[Tensor]:
    """Copies of a tensor for the stages, whose gradients are summed in the order of the stages, in fp32."""
    if stages == 1:
        return [q]
    return list(_Share.apply(q, stages))  # type: ignore[no-untyped-call]


def flat(x: Tensor) -> Tensor:
    """`x [B, H, n, D]` as rows `[B * H * n, D]`."""
    return x.reshape(-1, x.shape[-1])


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, transfers: Transfers, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.transfers, ctx.count = transfers, len(tensors)
        pending = []
        for stage in transfers.stages:
            started = [transfers.start(stage.sent.taken(flat(x)), stage.sent, stage.received) for x in tensors]
            transfers.works[stage] = [work for _, work in started]
            pending += [received for received, _ in started]
        return *(x.view_as(x) for x in tensors), *pending

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        transfers: Transfers = ctx.transfers
        returned = [(stage.sent, transfers.returned.pop(stage)) for stage in transfers.stages]
        summed = []
        for number, local in enumerate(gradients[: ctx.count]):
            parts = []
            for rows, tensors in returned:
                received, (work, _) = tensors[number]
                work.wait()
                parts.append((rows, received))
            summed.append(_with_returned(local, parts, transfers.rank))
        return None, *summed


def _with_returned(local: Tensor, parts: list[tuple[Rows, Tensor]], rank: int) -> Tensor:
    """The gradient of local keys, summed with what has come back for them, in the order of the ranks."""
    counts = [rows.counts for rows, _ in parts]
    senders = [other for other in range(len(counts[0])) if any(some[other] for some in counts)] if counts else []
    if not senders:
        return local
    if len(senders) == 1:  # no row comes twice from one rank, and the order of two numbers does not matter
        total = flat(local).clone(memory_format=torch.contiguous_format)
        for rows, values in parts:
            if len(values):
                _add(total, rows, values)
        return total.view(local.shape)
    total = torch.zeros(
        flat(local).shape, dtype=torch.promote_types(local.dtype, torch.float32), device=local.device
    )  # fmt: skip
    of_ranks = [zip(rows.on(local.device).split(rows.counts), values.split(rows.counts)) for rows, values in parts]
    of_rank = list(zip(*of_ranks, strict=True))
    for other, some in enumerate(of_rank):
        if other == rank:
            total += flat(local)
        for rows_of_rank, values in some:
            total[rows_of_rank] += values
    return total.to(local.dtype).view(local.shape)


def _add(total: Tensor, rows: Rows, values: Tensor) -> None:
    """Adds the values to their rows; each sum is rounded once."""
    if rows.are_all(len(total)):
        total += values
    else:
        at = rows.on(total.device)
        total.index_copy_(0, at, total.index_select(0, at) + values)


class _Arrive(Function):
    @staticmethod
    def forward(
        ctx: Any, transfers: Transfers, stage: Stage, shapes: list[torch.Size], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.transfers, ctx.stage, ctx.tokens = transfers, stage, shapes[0][2]
        ctx.width = stage.slots - stage.local
        for work, _ in transfers.works.pop(stage):
            work.wait()
        found = [
            stage.received.placed(values, batch * heads * ctx.width).view(batch, heads, ctx.width, dim)
            for values, (batch, heads, _, dim) in zip(tensors, shapes)
        ]
        if stage.local:
            found = [_joined(x, others, stage.local) for x, others in zip(tensors[len(shapes) :], found, strict=True)]
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        transfers, stage = ctx.transfers, ctx.stage
        rows = [stage.received.taken(flat(gradient[:, :, stage.local :])) for gradient in gradients]
        transfers.returned[stage] = [transfers.start(some, stage.received, stage.sent) for some in rows]
        own = [gradient[:, :, : ctx.tokens] for gradient in gradients] if stage.local else []
        return None, None, None, *rows, *own  # `_Start` takes what was sent back; the rows only have the right shape


def _joined(local: Tensor, others: Tensor, first: int) -> Tensor:
    """Local tokens `[B, H, n, D]`, zeros as far as token `first`, and those of other ranks."""
    batch, heads, tokens, dim = local.shape
    return torch.cat([local, local.new_zeros((batch, heads, first - tokens, dim)), others], dim=2)


class _Share(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(q.view_as(q) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if len(gradients) == 2:
            return gradients[0] + gradients[1], None  # is rounded once
        total = gradients[0].to(torch.promote_types(gradients[0].dtype, torch.float32))
        for gradient in gradients[1:]:
            total = total + gradient
        return total.to(gradients[0].dtype), None
