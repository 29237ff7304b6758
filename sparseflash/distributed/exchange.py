"""Keys and values travel to the ranks that read them, or queries to keys, and their gradients travel back.

The exchanges of all stages are started together and each is waited for when its keys are needed, so that they overlap
with attention to what is there already. Backward runs the stages in reverse order: as soon as the attention of a stage
has its gradients they are sent back, while earlier stages, the local one last, are still being computed. Each owner
then adds what came back in the order of the ranks, in fp32, whatever arrived first.
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
    """One call's exchanges under way: the stages, the group, and the operations that have been started."""

    stages: list[Stage]
    group: dist.ProcessGroup
    rank: int
    sent: Sent
    works: dict[int, Any] = field(default_factory=dict)
    returned: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)

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


def exchanged(tensors: Sequence[Tensor], transfers: Transfers) -> tuple[list[Tensor], list[Tensor]]:
    """Starts all exchanges of tensors `[B, H, n, D]` side by side: `(the local tensors, one pending tensor a stage)`.

    Use the local tensors that are returned: their gradients are summed with those that come back.
    """
    found = _Start.apply(transfers, *tensors)  # type: ignore[no-untyped-call]
    return list(found[: len(tensors)]), list(found[len(tensors) :])


def arrived(pending: Tensor, stage: int, transfers: Transfers, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a stage, `[B, H, slots, D]` each, once they have come; unused slots are 0. `like`: those sent."""
    shapes = [x.shape for x in like]
    return list(_Arrive.apply(transfers, stage, pending, shapes))  # type: ignore[no-untyped-call]


def for_each_stage(q: Tensor, stages: int) -> list[Tensor]:
    """Copies of a tensor for the stages, whose gradients are summed in the order of the stages, in fp32."""
    if stages == 1:
        return [q]
    return list(_Share.apply(q, stages))  # type: ignore[no-untyped-call]


def _side_by_side(tensors: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
    """Rows of tensors `[B, H, n, D]`, of keys and values for example: `[rows, sum of the D]`."""
    flat = [x.reshape(-1, x.shape[-1]) for x in tensors]
    return torch.cat(flat if rows is None else [x.index_select(0, rows) for x in flat], dim=1)


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, transfers: Transfers, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.transfers, ctx.shapes = transfers, [x.shape for x in tensors]
        pending = []
        for number, stage in enumerate(transfers.stages[1:], 1):
            data = _side_by_side(tensors, stage.sent.on(tensors[0].device))
            received, transfers.works[number] = transfers.start(data, stage.sent, stage.received)
            pending.append(received)
        return *(x.view_as(x) for x in tensors), *pending

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        transfers: Transfers = ctx.transfers
        local = _side_by_side(gradients[: len(ctx.shapes)])
        total = torch.zeros(local.shape, dtype=torch.promote_types(local.dtype, torch.float32), device=local.device)
        parts: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        for number, stage in enumerate(transfers.stages[1:], 1):
            received, (work, _) = transfers.returned.pop(number)
            work.wait()
            counts = stage.sent.counts
            parts.append((stage.sent.on(local.device).split(counts), received.split(counts)))
        for rank in range(dist.get_world_size(transfers.group)):
            if rank == transfers.rank:
                total += local
            for rows, values in parts:
                total[rows[rank]] += values[rank]  # no row comes twice from one rank
        summed = total.to(local.dtype).split([shape[-1] for shape in ctx.shapes], dim=1)
        return None, *(x.reshape(shape) for x, shape in zip(summed, ctx.shapes, strict=True))


class _Arrive(Function):
    @staticmethod
    def forward(
        ctx: Any, transfers: Transfers, number: int, pending: Tensor, shapes: list[torch.Size]
    ) -> tuple[Tensor, ...]:
        ctx.transfers, ctx.number = transfers, number
        stage = transfers.stages[number]
        transfers.works.pop(number)[0].wait()
        rows = stage.received.on(pending.device)
        found = []
        for values, (batch, heads, _, dim) in zip(
            pending.split([shape[-1] for shape in shapes], dim=1), shapes, strict=True
        ):
            slots = values.new_zeros((batch * heads * stage.slots, dim))
            found.append(slots.index_copy_(0, rows, values).view(batch, heads, stage.slots, dim))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor, None]:
        transfers, number = ctx.transfers, ctx.number
        stage = transfers.stages[number]
        data = _side_by_side(gradients, stage.received.on(gradients[0].device))
        transfers.returned[number] = transfers.start(data, stage.received, stage.sent)
        return None, None, data, None  # `_Start` takes what was sent back; this only has the right shape


class _Share(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(q.view_as(q) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].to(torch.promote_types(gradients[0].dtype, torch.float32))
        for gradient in gradients[1:]:
            total = total + gradient
        return total.to(gradients[0].dtype), None
