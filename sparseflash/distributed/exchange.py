"""Keys and values travel to the ranks that read them, and their gradients travel back.

The exchanges of all stages are started together and each is waited for when its keys are needed, so that they overlap
with attention to what is there already. Backward runs the stages in reverse order: as soon as the attention of a stage
has its gradients they are sent back, while earlier stages, the local one last, are still being computed. Each owner
then adds what came back in the order of the ranks, in fp32, whatever arrived first.
"""

from __future__ import annotations

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
        received = data.new_empty((sum(incoming.counts), data.shape[1]))
        self.sent.count(data.numel() * data.element_size(), outgoing.counts)
        # As bytes, so that every backend of torch.distributed takes every dtype.
        work = dist.all_to_all_single(
            received.view(torch.uint8), data.contiguous().view(torch.uint8), incoming.counts, outgoing.counts,
            group=self.group, async_op=True,
        )  # fmt: skip
        return received, (work, data)  # the data must live until they are sent


def exchanged(k: Tensor, v: Tensor, transfers: Transfers) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Starts all exchanges: `(k, v, pending)`, with one pending tensor a stage for `arrived`."""
    local_k, local_v, *pending = _Start.apply(transfers, k, v)  # type: ignore[no-untyped-call]
    return local_k, local_v, pending


def arrived(pending: Tensor, stage: int, transfers: Transfers, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of a stage, `[B, Hkv, slots, D]` and `[..., Dv]`, once they have come; unused slots are 0."""
    keys, values = _Arrive.apply(transfers, stage, pending, k.shape, v.shape[-1])  # type: ignore[no-untyped-call]
    return keys, values


def for_each_stage(q: Tensor, stages: int) -> list[Tensor]:
    """Copies of q for the stages, whose gradients are summed in the order of the stages, in fp32."""
    if stages == 1:
        return [q]
    return list(_Share.apply(q, stages))  # type: ignore[no-untyped-call]


def _both(k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
    """Rows of keys and values side by side: `[rows, D + Dv]`."""
    flat = [x.reshape(-1, x.shape[-1]) for x in (k, v)]
    return torch.cat(flat if rows is None else [x.index_select(0, rows) for x in flat], dim=1)


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, transfers: Transfers, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        ctx.transfers, ctx.shapes = transfers, (k.shape, v.shape)
        pending = []
        for number, stage in enumerate(transfers.stages[1:], 1):
            data = _both(k, v, stage.sent.on(k.device))
            received, transfers.works[number] = transfers.start(data, stage.sent, stage.received)
            pending.append(received)
        return k.view_as(k), v.view_as(v), *pending

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        transfers: Transfers = ctx.transfers
        local = _both(gradients[0], gradients[1])
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
        k_shape, v_shape = ctx.shapes
        dk, dv = total.to(local.dtype).split([k_shape[-1], v_shape[-1]], dim=1)
        return None, dk.reshape(k_shape), dv.reshape(v_shape)


class _Arrive(Function):
    @staticmethod
    def forward(
        ctx: Any, transfers: Transfers, number: int, pending: Tensor, k_shape: torch.Size, v_dim: int
    ) -> tuple[Tensor, Tensor]:
        ctx.transfers, ctx.number = transfers, number
        stage = transfers.stages[number]
        transfers.works.pop(number)[0].wait()
        batch, heads, _, dim = k_shape
        rows = stage.received.on(pending.device)
        found = []
        for values in pending.split([dim, v_dim], dim=1):
            slots = values.new_zeros((batch * heads * stage.mask.k_len, values.shape[1]))
            found.append(slots.index_copy_(0, rows, values).view(batch, heads, stage.mask.k_len, -1))
        return found[0], found[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor, None, None]:
        transfers, number = ctx.transfers, ctx.number
        stage = transfers.stages[number]
        dk, dv = gradients
        data = _both(dk, dv, stage.received.on(dk.device))
        transfers.returned[number] = transfers.start(data, stage.received, stage.sent)
        return None, None, data, None, None  # `_Start` takes what was sent back; this only has the right shape


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
