"""All-to-all over heads (DeepSpeed Ulysses, Jacobs et al. 2023): each rank attends with some heads over all tokens.

Backward is the same exchange in the other direction; nothing is summed, so one rank gives the same bits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sparseflash.distributed.exchange import Sent
from sparseflash.distributed.shards import Shards
from sparseflash.inverse_gradient import apply_with_inverse


def to_heads(x: Tensor, shards: Shards, group: dist.ProcessGroup, sent: Sent) -> Tensor:
    """This rank's tokens of all heads `[B, H, n, D]` to all tokens, in their order, of its heads `[B, H / R, N, D]`."""
    return apply_with_inverse(
        lambda x: _gather_tokens(x, shards, group, sent), lambda x: _gather_heads(x, shards, group, sent), x
    )


def to_tokens(x: Tensor, shards: Shards, group: dist.ProcessGroup, sent: Sent) -> Tensor:
    """The inverse of `to_heads`."""
    return apply_with_inverse(
        lambda x: _gather_heads(x, shards, group, sent), lambda x: _gather_tokens(x, shards, group, sent), x
    )


def _exchange(parts: list[Tensor], shapes: list[torch.Size], group: dist.ProcessGroup, sent: Sent) -> list[Tensor]:
    rank, width = dist.get_rank(group), parts[0].shape[-1]
    data = torch.cat([part.reshape(-1, width) for part in parts])
    counts_out = [part.numel() // width for part in parts]
    counts_in = [shape.numel() // width for shape in shapes]
    received = data.new_empty(sum(counts_in), width)
    others = [0 if other == rank else count for other, count in enumerate(counts_out)]
    sent.count(sum(others) * width * data.element_size(), others)
    dist.all_to_all_single(received.view(torch.uint8), data.view(torch.uint8), counts_in, counts_out, group=group)
    return [part.view(shape) for part, shape in zip(received.split(counts_in), shapes, strict=True)]


def _gather_tokens(x: Tensor, shards: Shards, group: dist.ProcessGroup, sent: Sent) -> Tensor:
    batch, heads, _, dim = x.shape
    shapes = [torch.Size((batch, heads // shards.ranks, count, dim)) for count in shards.counts]
    joined = torch.cat(_exchange(list(x.chunk(shards.ranks, dim=1)), shapes, group, sent), dim=2)
    return shards.in_sequence(joined, 2)


def _gather_heads(x: Tensor, shards: Shards, group: dist.ProcessGroup, sent: Sent) -> Tensor:
    batch, heads, _, dim = x.shape
    count = shards.counts[dist.get_rank(group)]
    shapes = [torch.Size((batch, heads, count, dim))] * shards.ranks
    parts = shards.by_rank(x, 2).split(shards.counts, dim=2)
    return torch.cat(_exchange(list(parts), shapes, group, sent), dim=1)
