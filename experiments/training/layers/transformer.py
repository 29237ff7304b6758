"""The pre-norm layer of a transformer encoder, in two halves around its attention.

Shapes: B sequences, N positions (padded), H heads, W width, D features a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.training.layers.attention import ElementMask, attention
from experiments.training.layers.depthwise import depthwise
from experiments.training.layers.rotary import Rotations
from sparseflash import BlockMask
from sparseflash.distributed import ShardPlan
from sparseflash.nn.rotary import Rotation, rotate

_GRAPHS = 64  # of each half


class RMSNorm(nn.RMSNorm):
    """With the weight in the input's dtype, which differs under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class SelfAttention(nn.Module):
    def __init__(
        self, width: int, heads: int, head_dim: int, dropout: float, qk_norm: bool, implementation: str = "sparseflash"
    ) -> None:
        super().__init__()
        self.heads = heads
        self.implementation = implementation
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * heads * head_dim)
        self.out = nn.Linear(heads * head_dim, width)
        self.q_norm: nn.Module = RMSNorm(head_dim) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(head_dim) if qk_norm else nn.Identity()

    def project(self, x: Tensor, rotation: Rotation | Rotations | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Each [B, H, N, D]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [3, B, H, N, D]
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            of_q, of_k = rotation if isinstance(rotation, Rotations) else (rotation, rotation)
            q, k = rotate(q, of_q), rotate(k, of_k)
        return q.to(v.dtype), k.to(v.dtype), v  # under autocast

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | ShardPlan | ElementMask) -> Tensor:
        return attention(self.implementation, q, k, v, mask, dropout_p=self.dropout if self.training else 0.0)


class DepthwiseConvolution(nn.Module):
    """Adds a weighted sum of its neighbours to each token, feature by feature; at first it changes nothing.

    size: tokens of the window, or pixels along each side of it. side: the tokens are the pixels of square images with
    this side, row by row; None: sequences.
    """

    def __init__(self, width: int, size: int, side: int | None = None) -> None:
        super().__init__()
        self.side = side
        self.weight = nn.Parameter(torch.zeros(size if side is None else size * size, width))

    def forward(self, x: Tensor, live: Tensor | None = None) -> Tensor:
        """x: [B, N, W]. live: bool [B, N, 1], False at padding, which no token reads; None without padding."""
        known = x if live is None else x.masked_fill(~live, 0)
        return x + depthwise(known, self.weight.to(x.dtype), self.side)


class Layer(nn.Module):
    """Attention, a convolution if there is one, then an MLP, each with a residual connection."""

    def __init__(
        self,
        width: int,
        mlp: int,
        dropout: float,
        attention: SelfAttention,
        convolution: DepthwiseConvolution | None = None,
    ) -> None:
        super().__init__()
        self.convolution = convolution
        self.attention_norm = nn.LayerNorm(width)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp), nn.GELU(), nn.Dropout(dropout), nn.Linear(mlp, width))
        self.dropout = nn.Dropout(dropout)


def head_dim_of(width: int, heads: int, head_dim: int | None) -> int:
    if head_dim is None and width % heads:
        raise ValueError(f"width must be a multiple of heads; got width {width}, heads {heads}")
    return head_dim or width // heads


def before_attention(layer: Layer, x: Tensor, rotation: Rotation | Rotations | None) -> tuple[Tensor, Tensor, Tensor]:
    return layer.attention.project(layer.attention_norm(x), rotation)


def after_attention(layer: Layer, x: Tensor, mixed: Tensor, live: Tensor | None = None) -> Tensor:
    """[B, N, W], from the input and the attention [B, H, N, D]. live: see DepthwiseConvolution."""
    x = x + layer.dropout(layer.attention.out(mixed.transpose(1, 2).flatten(2)))
    if layer.convolution is not None:
        x = layer.convolution(x, live)
    result: Tensor = x + layer.dropout(layer.mlp(layer.mlp_norm(x)))
    return result


class Halves(NamedTuple):
    before: Callable[[Layer, Tensor, Rotation | Rotations | None], tuple[Tensor, Tensor, Tensor]] = before_attention
    after: Callable[[Layer, Tensor, Tensor, Tensor | None], Tensor] = after_attention


def compiled_halves() -> Halves:
    """By torch.compile; attention is already one kernel.

    All layers share two pairs of graphs: one for the first batch shape, one for all others.
    """
    torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
    return Halves(torch.compile(before_attention, fullgraph=True), torch.compile(after_attention, fullgraph=True))
