"""The classifier: encoder layers, each with its own mask and token order.

Shapes: B rows of N tokens, I images, W width, H heads, D features per head, M blocks in all, K blocks per image.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from experiments.pathx.data.device_batch import Batch, between
from experiments.pathx.data.packing import LEVELS
from experiments.pathx.masks.orders import BASE
from experiments.pathx.model.gather import GatherGroups, Permute, places_in_groups
from experiments.pathx.model.intensity import SmoothEmbedding
from experiments.training.layers.transformer import Halves, Layer, SelfAttention, compiled_halves, head_dim_of
from sparseflash.nn.rotary import Rotation, line_rates, line_rotation, plane_rates, plane_rotation

CLASSES = 2


class PathModel(nn.Module):
    """Embedding of grey levels, layers with 2D rotary positions and normalised queries and keys, mean and max pooling,
    a head.

    Positions are in pixels, so the weights read images of every size.

    line: positions are row-major indices instead. smooth: features change gradually with the grey level; otherwise each
    level has a row. pixel_classes: of a second head in training; 0: no head.
    """

    rates: Tensor

    def __init__(
        self,
        *,
        depth: int,
        width: int,
        heads: int,
        head_dim: int | None = None,
        mlp: int,
        dropout: float = 0.0,
        registers: int = 0,
        pixel_classes: int = 0,
        smooth: bool = False,
        line: bool = False,
    ) -> None:
        super().__init__()
        head_dim = head_dim_of(width, heads, head_dim)
        self.registers = registers
        self.embedding: nn.Module
        if smooth:
            self.embedding = SmoothEmbedding(registers, width)
        else:
            self.embedding = nn.Embedding(LEVELS + registers, width)
            nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.line = line
        self.register_buffer("rates", line_rates(head_dim) if line else plane_rates(head_dim), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            Layer(width, mlp, dropout, SelfAttention(width, heads, head_dim, 0.0, qk_norm=True)) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(2 * width, mlp), nn.GELU(), nn.Linear(mlp, CLASSES))
        self.tracer = nn.Linear(width, pixel_classes) if pixel_classes else None
        self.training_halves = Halves()

    def compile_layers(self) -> None:
        self.training_halves = compiled_halves()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        x = self.norm(self.encoded(batch))
        pooled = pool(x, batch)  # [I, 2 W]
        logits: Tensor = self.head(pooled)
        return logits, None if self.tracer is None else self.tracer(x)

    def encoded(self, batch: Batch, listener: Callable[[int, Tensor, Tensor], None] | None = None) -> Tensor:
        """listener: called with each layer's number, q and k, [B, H, N, D], in the layer's order."""
        x = self.dropout(self.embedding(batch.ids.clamp(min=0).int()))  # [B, N, W]
        if self.line:
            rotation = line_rotation(batch.y.int() * batch.side + batch.x, self.rates)
        else:
            rotation = plane_rotation(batch.y, batch.x, self.rates)
        rotations: dict[str, Rotation] = {BASE: rotation}
        now = BASE
        halves = self.training_halves if self.training else Halves()
        for number, (layer, mask, order) in enumerate(zip(self.layers, batch.masks, batch.layer_orders, strict=True)):
            if order not in rotations:
                rotations[order] = rotation.index_select(2, batch.orders[order].order)
            x, now = reordered(x, batch, now, order), order
            q, k, v = halves.before(layer, x, rotations[order])
            if listener is not None:
                listener(number, q, k)
            x = halves.after(layer, x, layer.attention.mix(q, k, v, mask), None)
        return reordered(x, batch, now, BASE)


def reordered(x: Tensor, batch: Batch, now: str, then: str) -> Tensor:
    if now == then:
        return x
    move = between(batch, now, then)
    moved: Tensor = Permute.apply(x, move.order, move.inverse)
    return moved


def pool(x: Tensor, batch: Batch) -> Tensor:
    """Mean and maximum of each image's live tokens, [I, 2 W], within blocks first: a fixed order of sums."""
    live = batch.live.reshape(-1, batch.block, 1)  # [M, block, 1]
    x = x.reshape(-1, batch.block, x.shape[-1])  # [M, block, W]
    place = places_in_groups(batch.blocks, len(x))

    def grouped(of_blocks: Tensor, filler: float) -> Tensor:  # [I, K, ...]
        each: Tensor = GatherGroups.apply(of_blocks, batch.blocks, place, filler)
        return each

    counts = grouped(live.sum(1).to(x.dtype), 0.0).sum(1)  # [I, 1]
    means = grouped((x * live).sum(1), 0.0).sum(1) / counts.clamp(min=1)
    tops = grouped(x.masked_fill(~live, -math.inf).amax(1), -math.inf).amax(1)
    return torch.cat([means, tops.masked_fill(counts == 0, 0.0)], dim=-1)
