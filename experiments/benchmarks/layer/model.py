"""The layer, which leaves attention to a function that it is given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Dynamo cannot trace their kernels, which their authors call outside of the graph, too.
NOT_TRACED = ("fa4", "fa4-deterministic", "cudnn-sparse")


class Layer(nn.Module):
    """x [B, N, W] to [B, N, W]: attention, then an MLP four times as wide, each after a norm and added to its input.

    attend: q, k, v [B, H, N, D] to the same shape, W = H * D. They are views of [B, N, 3, H, D], as projections make
    them.
    """

    def __init__(self, heads: int, dim: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        width = heads * dim
        self.heads, self.dim, self.attend = heads, dim, attend
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, W], the result likewise."""
        batch, tokens, width = x.shape
        split = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, self.dim)
        q, k, v = (each.transpose(1, 2) for each in split.unbind(2))
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, tokens, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return result


def compiled(layer: Layer, peer: str) -> Callable[[Tensor], Tensor]:
    """The layer under torch.compile: in one graph, or in the two around an attention that Dynamo cannot trace."""
    if peer in NOT_TRACED:
        layer.attend = torch.compiler.disable(layer.attend)
    made: Callable[[Tensor], Tensor] = torch.compile(layer, fullgraph=peer not in NOT_TRACED, dynamic=False)
    return made
