"""Keys and values travel to the ranks that read them, or queries to keys, and their gradients travel back.

The exchanges of all stages start together; each is waited for when its keys are needed. Backward runs the stages in
reverse: the gradients of a stage are sent back as soon as they are computed. Each owner adds the gradients that come
back to its own, by rank and in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sparseflash.distributed.stages import Route, Stage
from sparseflash.distributed.transport import Message, Transport, Wait, room_of
from sparseflash.first_derivatives import first_derivatives

NO_SECOND = (
    "gradients of gradients are not implemented over several ranks where keys or queries travel; "
    "distributed.shard(mask, strategy='heads') with backend='reference' has them."
)


@dataclass(eq=False)
class Sent:
    """The bytes and messages that a rank has sent, counted where they are sent.

    >>> Sent().bytes
    0
    """

    bytes: int = 0
    messages: int = 0

    def count(self, size: int, counts: list[int], tensors: int = 1) -> None:
        """Adds an exchange of tensors, `size` bytes in all; `counts`: rows for each rank, 0 for this rank."""
        self.bytes += size
        self.messages += tensors * sum(each > 0 for each in counts)


@dataclass(eq=False)
class Transfers:
    """`kept`, `returned`: of the backward, for each stage: gradients of its kept keys, and of keys that were sent
    back.
    """

    route: Route
    transport: Transport
    sent: Sent
    waits: dict[Stage, Wait] = field(default_factory=dict)
    kept: dict[Stage, list[Tensor]] = field(default_factory=dict)
    returned: dict[Stage, tuple[list[Tensor], Wait]] = field(default_factory=dict)

    def room(self, tensors: Sequence[Tensor]) -> int:
        sizes = [x.shape[-1] * x.element_size() for x in tensors]
        return sum(room_of(stage.between(), sizes) for stage in self.route.exchanging)

    def start(
        self, tensors: Sequence[Tensor], stage: Stage, *, back: bool = False, packed: bool = False
    ) -> tuple[list[Tensor], Wait]:
        """Starts a stage's exchange of tensors `[rows, D]`: `(rows to be received, a wait, for each)`.

        `back`: rows return to where they are from; `packed`: the tensors have just the rows that are sent.
        """
        outgoing, incoming = (stage.received, stage.sent) if back else (stage.sent, stage.received)
        size = sum(x.shape[1] * x.element_size() for x in tensors) * sum(outgoing.counts)
        self.sent.count(size, outgoing.counts, len(tensors))
        between = (lambda: stage.between().T) if back else stage.between
        taken = None if packed else outgoing
        return self.transport.start(tensors, Message(taken, outgoing.counts, incoming.counts, between))


def exchanged(tensors: Sequence[Tensor], transfers: Transfers) -> tuple[list[Tensor], dict[Stage, list[Tensor]]]:
    """Starts all exchanges of tensors `[B, H, n, D]`: `(the local tensors, the pending tensors of each stage)`.

    Use the returned local tensors: their gradients are summed with those that come back.
    """
    found = _Start.apply(transfers, *tensors)  # type: ignore[no-untyped-call]
    count = len(tensors)
    parts = [list(found[first : first + count]) for first in range(0, len(found), count)]
    return parts[0], dict(zip(transfers.route.exchanging, parts[1:], strict=True))


def arrived(pending: Sequence[Tensor], stage: Stage, transfers: Transfers, local: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a stage, `[B, H, slots, D]` each, once they have arrived; unused slots are 0."""
    # The gradients of local tensors do not go this way: see `Transfers.kept`.
    held = [x.detach() for x in local]
    return list(_Arrive.apply(transfers, stage, held, *pending))  # type: ignore[no-untyped-call]


def for_each_stage(q: Tensor, stages: int) -> list[Tensor]:
    """Copies of a tensor for the stages; their gradients are summed in the order of the stages, in fp32."""
    if stages == 1:
        return [q]
    return list(_Share.apply(q, stages))  # type: ignore[no-untyped-call]


def flat(x: Tensor) -> Tensor:
    """`x [B, H, n, D]` as rows `[B * H * n, D]`."""
    return x.reshape(-1, x.shape[-1])


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, transfers: Transfers, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.transfers, ctx.shapes = transfers, [x.shape for x in tensors]
        ctx.set_materialize_grads(False)
        pending = []
        for stage in transfers.route.exchanging:
            received, transfers.waits[stage] = transfers.start([flat(x) for x in tensors], stage)
            pending += received
        return *(x.view_as(x) for x in tensors), *pending

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        transfers: Transfers = ctx.transfers
        parts: list[list[Tensor]] = [[] for _ in ctx.shapes]
        for stage in transfers.route.exchanging:
            returned, wait = transfers.returned.pop(stage)
            wait()
            for part, own, received in zip(parts, transfers.kept.pop(stage), returned, strict=True):
                part += [own, received]

        def added(*given: Any) -> tuple[Tensor | None, ...]:
            # Attention made the local gradients for this alone, so the sums may be written in their place.
            local, others = given[: len(parts)], iter(given[len(parts) :])
            return tuple(
                gradient if not part else
                transfers.route.added(
                    None if gradient is None else flat(gradient), [next(others) for _ in part], shape[:-1].numel()
                ).view(shape)
                for gradient, part, shape in zip(local, parts, ctx.shapes)
            )  # fmt: skip

        given = *gradients[: len(parts)], *(x for part in parts for x in part)
        return None, *first_derivatives(NO_SECOND, added, *given)


class _Arrive(Function):
    @staticmethod
    def forward(
        ctx: Any, transfers: Transfers, stage: Stage, local: list[Tensor], *pending: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.transfers, ctx.stage = transfers, stage
        ctx.kept = sum(stage.own.counts) // local[0].shape[:2].numel()
        transfers.waits.pop(stage)()
        found = []
        for values, x in zip(pending, local, strict=True):
            (batch, heads, _, dim), width = x.shape, stage.slots - stage.kept
            parts = [stage.received.placed(values, batch * heads * width).view(batch, heads, width, dim)]
            if stage.kept:
                own = stage.own.taken(flat(x)).view(batch, heads, ctx.kept, dim)
                parts = [own, x.new_zeros((batch, heads, stage.kept - ctx.kept, dim)), *parts]
            found.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        transfers, stage = ctx.transfers, ctx.stage
        remote = [flat(gradient[:, :, stage.kept :]) for gradient in gradients]
        transfers.returned[stage] = transfers.start(remote, stage, back=True)
        transfers.kept[stage] = [flat(gradient[:, :, : ctx.kept]) for gradient in gradients]
        return None, None, None, *(None for _ in gradients)


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
