"""The classifier: a pre-LN transformer encoder whose layers each attend through their own mask.

Shapes: B sequences, N positions (padded), H heads, W width, D features a head, C classes,
T sequences an example (1, or 2 for Retrieval).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparseflash import BlockMask, attention

POOLS = ("cls", "first", "mean", "max")
POSITIONS = ("learned", "sinusoidal")
SMALLEST_HEAD = 16


class SelfAttention(nn.Module):
    """Multi-head self-attention over the live scores of a mask."""

    def __init__(self, width: int, heads: int, head_dim: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.dropout = dropout  # of the weights
        self.qkv = nn.Linear(width, 3 * heads * head_dim)
        self.out = nn.Linear(heads * head_dim, width)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each [B, H, N, D]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [3, B, H, N, D]
        return q, k, v

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        """Attention [B, H, N, D]. The kernel takes heads of 16 and more: zeros beside fewer change nothing."""
        missing = max(0, SMALLEST_HEAD - self.head_dim)
        if missing:
            q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        return attention(q, k, v, mask, scale=self.head_dim**-0.5, dropout_p=dropout)[..., : self.head_dim]

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        y: Tensor = self.out(self.mix(*self.project(x), mask).transpose(1, 2).flatten(2))  # [B, N, W]
        return y


class Layer(nn.Module):
    """Attention, then an MLP, each on the normalised input and added to it."""

    def __init__(
        self, width: int, heads: int, head_dim: int, mlp: int, dropout: float, attention_dropout: float
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, head_dim, attention_dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp), nn.GELU(), nn.Dropout(dropout), nn.Linear(mlp, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class Classifier(nn.Module):
    """Embedding, positions, layers, pooling over the live positions, and a head.

    masks: one for each layer, N queries and N keys, on the device where the model will run.
    towers: sequences an example. Of two, x and y, the head reads [x, y, x * y, x - y] (the Long Range Arena's "NLI").
    pool: "cls" reads position 0, where the batches then put [CLS]; "first" reads it too, but there the
        example's own first token stands; "mean" and "max" read all live positions.
    """

    def __init__(
        self,
        masks: Sequence[BlockMask],
        *,
        vocabulary: int,
        classes: int,
        towers: int,
        width: int,
        heads: int,
        head_dim: int | None,
        mlp: int,
        dropout: float,
        attention_dropout: float,
        pool: str,
        positions: str,
    ) -> None:
        super().__init__()
        if head_dim is None and width % heads:
            raise ValueError(f"width must be a multiple of heads; got width {width}, heads {heads}")
        head_dim = head_dim or width // heads
        if pool not in POOLS:
            raise ValueError(f"pool must be one of {', '.join(POOLS)}; got {pool!r}")
        if positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}; got {positions!r}")
        self.masks = tuple(masks)
        self.pool = pool
        self.towers = towers
        length = self.masks[0].q_len
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        if positions == "learned":
            self.positions = nn.Parameter(torch.randn(length, width) * width**-0.5)
        else:
            self.register_buffer("positions", sinusoids(length, width), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, head_dim, mlp, dropout, attention_dropout) for _ in self.masks)
        self.norm = nn.LayerNorm(width)
        features = width if towers == 1 else 4 * width
        self.head = nn.Sequential(nn.Linear(features, mlp), nn.GELU(), nn.Linear(mlp, classes))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Logits [B, C] of ids [B * T, N]; positions at or past lengths [B * T] are padding and take no part."""
        x = self.dropout(self.embedding(ids) + self.positions)  # [B * T, N, W]
        # Layers that share a mask share the plan that the library derives for this batch's lengths.
        padded = {id(mask): mask.with_lengths(lengths) for mask in self.masks}
        for layer, mask in zip(self.layers, self.masks, strict=True):
            x = layer(x, padded[id(mask)])
        pooled = pool(self.norm(x), lengths, self.pool)  # [B * T, W]
        if self.towers == 2:
            first, second = pooled[0::2], pooled[1::2]
            pooled = torch.cat([first, second, first * second, first - second], dim=-1)
        logits: Tensor = self.head(pooled)
        return logits


def pool(x: Tensor, lengths: Tensor, how: str) -> Tensor:
    """One vector [B, W] for each sequence of x [B, N, W]."""
    if how in ("cls", "first"):
        return x[:, 0]
    live = (torch.arange(x.shape[1], device=x.device) < lengths[:, None])[..., None]  # [B, N, 1]
    if how == "mean":
        return (x * live).sum(1) / lengths[:, None]
    return x.masked_fill(~live, -math.inf).amax(1)


def sinusoids(length: int, width: int) -> Tensor:
    """Fixed positions [N, W]: sines and cosines of wavelengths 2 pi to 20,000 pi (Vaswani et al., 2017)."""
    if width % 2:
        raise ValueError(f"sinusoidal positions need an even width; got {width}")
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length)[:, None] * rates  # [N, W / 2]
    # Scaled to the size of the embedding, which they are added to.
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1) * math.sqrt(2 / width)
