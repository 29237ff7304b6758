"""A model with one layer of attention that must look values up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.selection.fixed import Fixed
from experiments.selection.layers import layer_of, read_by
from experiments.selection.recall import Batch, Recall
from experiments.selection.sizes import Sizes
from sparseflash import BlockMask


class RecallModel(nn.Module):
    """Embeddings of keys and values, one layer of attention, and a classifier of the queries' values.

    way: a name in LAYERS, or a pattern for `fixed.of_text`.
    alike: initialise the query projection with the key projection of its group, so that queries are nearest to pairs
        with their own key. Without it, no model learns recall among thousands of keys, dense attention included.
    marked: all queries share the embedding of "no value"; otherwise it is zero. A choice by means of blocks prefers
        blocks of queries that share something: see the README.
    """

    def __init__(self, task: Recall, sizes: Sizes, way: str, *, alike: bool = False, marked: bool = True) -> None:
        super().__init__()
        self.task, self.sizes = task, sizes
        self.keys = nn.Embedding(task.keys, sizes.width)
        self.values = nn.Embedding(task.values + 1, sizes.width, padding_idx=None if marked else task.values)
        self.attention: Any = layer_of(way, sizes)
        self.attention.out = nn.Identity()
        self.out = nn.Linear(sizes.heads * sizes.dim, task.values)
        if alike:
            begin_alike(self.attention)

    def forward(self, batch: Batch) -> tuple[Tensor, BlockMask | None]:
        x = F.rms_norm(self.keys(batch.keys) + self.values(batch.values), (self.sizes.width,))
        made: list[Any] = [None]
        layer = self.attention
        if not isinstance(layer, Fixed):
            layer.choice = lambda *given: made.append(type(layer).choice(layer, *given)) or made[-1]
        try:
            out = layer(x)
        finally:
            layer.__dict__.pop("choice", None)
        queries = self.task.queries
        read = None if self.training else read_by(layer, made[-1], self.sizes, queries)
        return self.out(out[:, -queries:]), read

    def found(self, mask: BlockMask, batch: Batch) -> Tensor:
        rows = mask.to_dense()[:, :, -self.task.queries :].expand(len(batch.where), -1, -1, -1)
        return rows.gather(3, batch.where[:, None, :, None].expand(-1, rows.shape[1], -1, 1)).squeeze(3)


@torch.no_grad()
def begin_alike(layer: Any) -> None:
    """Copies the key projection of each group to its query heads; the keys of all branches begin as one."""
    kv_heads, branches = layer.kv_heads, getattr(layer, "pairs", 1)
    weights = layer.qkv.weight.unflatten(0, (-1, layer.head_dim))
    queries, keys, _ = weights.split([layer.num_heads, branches * kv_heads, branches * kv_heads])
    first = keys[:kv_heads].clone()
    keys.copy_(first.repeat(branches, 1, 1))
    queries.copy_(first.repeat_interleave(layer.num_heads // kv_heads, 0))
