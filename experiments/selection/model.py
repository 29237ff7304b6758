"""A model with one layer of attention that must look values up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.selection import fixed
from experiments.selection.fixed import Fixed
from experiments.selection.moba import MoBA
from experiments.selection.nsa import NSA
from experiments.selection.recall import Batch, Recall
from experiments.selection.shared_blocks import SharedBlocks
from experiments.selection.sizes import Sizes
from experiments.selection.vsa import VSA
from sparseflash import BlockMask

WAYS: dict[str, Callable[[Sizes], nn.Module]] = {
    "dense": partial(Fixed, pattern=fixed.dense),
    "window": partial(Fixed, pattern=fixed.window),
    "strided": partial(Fixed, pattern=fixed.strided),
    "NSA": NSA,
    "MoBA": MoBA,
    "shared blocks": SharedBlocks,
    "VSA": lambda sizes: VSA(sizes, (sizes.tokens // 64, 8, 8), (sizes.block // 16, 4, 4)),
}


def attention_of(way: str, sizes: Sizes) -> nn.Module:
    """The attention of a way, or of a pattern. Raises ValueError if the text is neither."""
    if way in WAYS:
        return WAYS[way](sizes)
    if not {":", "("} & set(way):
        raise ValueError(
            f"way must be one of {', '.join(WAYS)}, or a pattern such as 'streaming(n, window=64, sink=4)' or "
            f"mine.py:rule; got {way!r}."
        )
    return Fixed(sizes, partial(fixed.of_text, way))


class RecallModel(nn.Module):
    """Embeddings of keys and values, one layer of attention, and a classifier of the queries' values.

    way: a name in WAYS, or a pattern for `fixed.of_text`.
    alike: initialise the query projection with the key projection of its group, so that queries are nearest to pairs
        with their own key. Without it, no model learns recall among thousands of keys, dense attention included.
    """

    def __init__(self, task: Recall, sizes: Sizes, way: str, *, alike: bool = False) -> None:
        super().__init__()
        self.task, self.sizes = task, sizes
        self.keys = nn.Embedding(task.keys, sizes.width)
        self.values = nn.Embedding(task.values + 1, sizes.width)
        self.qkv = nn.Linear(sizes.width, (sizes.heads + 2 * sizes.kv_heads) * sizes.dim, bias=False)
        if alike:
            with torch.no_grad():
                queries, keys, _ = self.qkv.weight.unflatten(0, (-1, sizes.dim)).split(
                    [sizes.heads, sizes.kv_heads, sizes.kv_heads]
                )
                queries.copy_(keys.repeat_interleave(sizes.group, 0))
        self.temperature = nn.Parameter(torch.ones(sizes.heads, 1, 1))
        self.attention = attention_of(way, sizes)
        self.out = nn.Linear(sizes.heads * sizes.dim, task.values)

    def forward(self, batch: Batch) -> tuple[Tensor, BlockMask]:
        """The logits `[B, Q, values]` of the queries, and the mask of the keys that were read."""
        sizes = self.sizes
        x = F.rms_norm(self.keys(batch.keys) + self.values(batch.values), (sizes.width,))
        q, k, v = self.qkv(x).unflatten(2, (-1, sizes.dim)).transpose(1, 2).split(
            [sizes.heads, sizes.kv_heads, sizes.kv_heads], 1
        )  # fmt: skip
        # Normalised to one length, so that a learned factor sets how sharp attention is.
        q, k = F.rms_norm(q, (sizes.dim,)) * self.temperature, F.rms_norm(k, (sizes.dim,))
        if isinstance(self.attention, VSA):  # sequence neighbours share a cube
            video, order = self.attention.inverse, self.attention.order
            out, mask = self.attention(x[:, video], *(y[:, :, video] for y in (q, k, v)))
            out = out[:, :, order]
        else:
            out, mask = self.attention(x, q, k, v)
        asking = out[:, :, -self.task.queries :].transpose(1, 2).flatten(2)
        return self.out(asking), mask

    def found(self, mask: BlockMask, batch: Batch) -> Tensor:
        """Whether the query heads read the block with the answer: bool `[B, Hq or 1, Q]`."""
        rows = mask.to_dense()[:, :, -self.task.queries :].expand(len(batch.where), -1, -1, -1)
        return rows.gather(3, batch.where[:, None, :, None].expand(-1, rows.shape[1], -1, 1)).squeeze(3)
