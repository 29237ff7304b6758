"""A sequence whose tokens lie on several ranks (context parallelism): each rank reads the keys of those before it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from sparseflash.blockmask.arguments import check_at_least_one
from sparseflash.first_derivatives import first_derivatives

_NO_SECOND = "gradients of gradients are not implemented with a context; one rank with backend='reference' has them."


class Context:
    """The tokens of a sequence on the ranks of a group: runs of equal size, up to one token, in the order of the ranks.

        context = selection.Context(tokens, group)  # the same on every rank
        out = layer(context.part(x), context=context)  # this rank's tokens, with gradients

    Every query chooses among all keys before it, on whichever rank they are. So keys, values and what the choice is
    made from travel to the later ranks, and their gradients travel back, where they are added in fp32: the own rank's
    first, then by rank. Equal inputs give equal bits.

    tokens: of the whole sequence. group: of torch.distributed; None: its default group.

    Gradients of weights, and an indexer's `loss`, are each rank's part: add them over the ranks.
    """

    def __init__(self, tokens: int, group: dist.ProcessGroup | None = None) -> None:
        check_at_least_one(tokens=tokens)
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if tokens < self.ranks:
            raise ValueError(f"tokens must be at least one for each of {self.ranks} ranks; got {tokens}.")
        self.tokens = tokens
        self.counts = [tokens // self.ranks + (rank < tokens % self.ranks) for rank in range(self.ranks)]
        self.start = sum(self.counts[: self.rank])

    @property
    def count(self) -> int:
        """Tokens of this rank."""
        return self.counts[self.rank]

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a tensor that has all."""
        return x.narrow(dim, self.start, self.count)

    def joined(self, x: Tensor) -> Tensor:
        """The rows `[B, H, n, D]` of this rank behind the rows of all ranks before it, `[B, H, start + n, D]`."""
        joined: Tensor = _Join.apply(x, self)  # type: ignore[no-untyped-call]
        return joined


def check_context(context: object, x: Tensor, cu_seqlens: Any, cache: object) -> None:
    """Raises unless it is the context of a sequence, and x has this rank's tokens."""
    if not isinstance(context, Context):
        raise TypeError(f"context must be selection.Context; got {type(context).__name__}.")
    if cu_seqlens is not None or cache is not None:
        other = "cache" if cu_seqlens is None else "cu_seqlens"
        raise ValueError(f"context must not be given with {other}; got both.")
    if x.shape[1] != context.count:
        raise ValueError(
            f"x must have the {context.count} tokens of rank {context.rank} of {context.ranks}, as context.part(x) "
            f"takes them; got {x.shape[1]}."
        )


class _Join(Function):
    @staticmethod
    @torch.compiler.disable(reason="collectives")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, context: Context) -> Tensor:
        ctx.context = context
        before = [count if rank < context.rank else 0 for rank, count in enumerate(context.counts)]
        after = [context.count if rank > context.rank else 0 for rank in range(context.ranks)]
        rows = x.permute(2, 0, 1, 3)
        sent = rows.contiguous().repeat(sum(count > 0 for count in after), 1, 1, 1)
        received = _exchanged(sent, after, before, context)
        return torch.cat([received, rows]).permute(1, 2, 0, 3)

    @staticmethod
    @torch.compiler.disable(reason="collectives")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context: Context = ctx.context
        before = [count if rank < context.rank else 0 for rank, count in enumerate(context.counts)]
        after = [context.count if rank > context.rank else 0 for rank in range(context.ranks)]

        def added(gradient: Tensor) -> tuple[Tensor]:
            rows = gradient.permute(2, 0, 1, 3)
            received = _exchanged(rows[: context.start].contiguous(), before, after, context)
            total = rows[context.start :].to(torch.promote_types(rows.dtype, torch.float32))
            for first in range(0, len(received), context.count):
                total = total + received[first : first + context.count]
            return (total.to(rows.dtype).permute(1, 2, 0, 3),)

        # A second derivative would lack the parts of the other ranks.
        return *first_derivatives(_NO_SECOND, added, gradient), None


def _exchanged(rows: Tensor, outgoing: list[int], incoming: list[int], context: Context) -> Tensor:
    received = rows.new_empty(sum(incoming), *rows.shape[1:])
    width = rows.shape[1:].numel() * rows.element_size()
    if width:
        # As bytes, so that every backend of torch.distributed takes every dtype.
        into, out = (x.view(-1).view(torch.uint8).view(len(x), width) for x in (received, rows))
        dist.all_to_all_single(into, out, incoming, outgoing, group=context.group)
    return received
