"""NATTEN's modules, with its arguments and parameters: a checkpoint of one loads into the other."""

from __future__ import annotations

from torch import Tensor, nn

from sparseflash.blockmask.arguments import check_at_least_one, dense_tensor
from sparseflash.interop.natten import Flags, PerAxis, na1d, na2d, na3d


class _NeighborhoodAttention(nn.Module):
    axes: int

    def __init__(
        self, embed_dim: int, num_heads: int, kernel_size: PerAxis, stride: PerAxis = 1, dilation: PerAxis = 1,
        is_causal: Flags = False, qkv_bias: bool = True, qk_scale: float | None = None, proj_drop: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        check_at_least_one(embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads; got {embed_dim} and {num_heads}.")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kernel_size, self.stride, self.dilation, self.is_causal = kernel_size, stride, dilation, is_causal
        self.scale = qk_scale or self.head_dim**-0.5
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.proj = nn.Linear(embed_dim, embed_dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, *grid, embed_dim]` as the same."""
        if dense_tensor(x, "x").ndim != self.axes + 2 or x.shape[-1] != self.embed_dim:
            grid = ("N", "height, width", "frames, height, width")[self.axes - 1]
            raise ValueError(f"x must have shape [B, {grid}, {self.embed_dim}]; got {list(x.shape)}.")
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        attend = (na1d, na2d, na3d)[self.axes - 1]
        out = attend(q, k, v, self.kernel_size, self.stride, self.dilation, self.is_causal, self.scale)
        found: Tensor = self.proj_drop(self.proj(out.flatten(-2)))
        return found

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, {self.num_heads} heads of {self.head_dim}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, dilation={self.dilation}, is_causal={self.is_causal}"
        )


class NeighborhoodAttention1D(_NeighborhoodAttention):
    """`natten.NeighborhoodAttention1D`: projections around `na1d`, `[B, N, embed_dim]`.

    >>> import torch
    >>> NeighborhoodAttention1D(64, 4, kernel_size=7, is_causal=True)(torch.randn(2, 50, 64)).shape
    torch.Size([2, 50, 64])
    """

    axes = 1


class NeighborhoodAttention2D(_NeighborhoodAttention):
    """`natten.NeighborhoodAttention2D`: projections around `na2d`, `[B, height, width, embed_dim]`.

    >>> import torch
    >>> NeighborhoodAttention2D(64, 4, kernel_size=(7, 5), dilation=2)(torch.randn(2, 16, 16, 64)).shape
    torch.Size([2, 16, 16, 64])

    Args:
        kernel_size, stride, dilation, is_causal: as for `na2d`.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        qk_scale: `1 / sqrt(head dim)` by default.
        proj_drop: the probability of dropout of the result.
    """

    axes = 2


class NeighborhoodAttention3D(_NeighborhoodAttention):
    """`natten.NeighborhoodAttention3D`: projections around `na3d`, `[B, frames, height, width, embed_dim]`.

    >>> import torch
    >>> NeighborhoodAttention3D(32, 2, kernel_size=3)(torch.randn(1, 4, 6, 6, 32)).shape
    torch.Size([1, 4, 6, 6, 32])
    """

    axes = 3
