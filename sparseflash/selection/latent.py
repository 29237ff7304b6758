"""Multi-head latent attention: all heads read one key, which holds its value."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparseflash.blockmask.arguments import check_at_least_one
from sparseflash.nn.rotary import Rotation
from sparseflash.selection.layer import normalised, rotated


class Latent(NamedTuple):
    """Sizes of multi-head latent attention; by default DeepSeek-V3's.

    rank, query_rank: features of the latent vectors of keys and values, and of queries. rotated, plain: features of a
    head's query that are rotated, and that are not. value: features of a head's value.
    """

    rank: int = 512
    rotated: int = 64
    plain: int = 128
    value: int = 128
    query_rank: int = 1536

    @property
    def key(self) -> int:
        return self.rank + self.rotated


class LatentProjections(nn.Module):
    """The projections of multi-head latent attention, absorbed.

    For a token x_t, with norms of latent vectors, and for head h:

        u_t = norm(x_t W_DQ),    c_t = norm(x_t W_DKV),    r_t = rotate(x_t W_KR)
        query  [u_t W_UQ^h, rotate(u_t W_QR^h)]            key  [c_t W_UK^h, r_t]            value  c_t W_UV^h

    The query times W_UK^h c_t equals `(W_UK^h)^T` times the query, times c_t. So all heads read the key [c_t, r_t],
    whose first features are the value, and the output of each head goes through W_UV^h.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, of: Latent, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:  # fmt: skip
        super().__init__()
        check_at_least_one(**{f"latent.{name}": size for name, size in of._asdict().items()})
        self.of, self.num_heads = of, num_heads
        made: Any = {"bias": False, "device": device, "dtype": dtype}
        self.q_down = nn.Linear(embed_dim, of.query_rank, **made)
        self.q_norm = nn.RMSNorm(of.query_rank, device=device, dtype=dtype)
        self.q_up = nn.Linear(of.query_rank, num_heads * (of.plain + of.rotated), **made)
        self.kv_down = nn.Linear(embed_dim, of.key, **made)
        self.kv_norm = nn.RMSNorm(of.rank, device=device, dtype=dtype)
        self.k_up = nn.Parameter(torch.empty(num_heads, of.plain, of.rank, device=device, dtype=dtype))
        self.v_up = nn.Parameter(torch.empty(num_heads, of.value, of.rank, device=device, dtype=dtype))
        for weight in (self.k_up, self.v_up):
            nn.init.uniform_(weight, -(of.rank**-0.5), of.rank**-0.5)

    def query_latent(self, x: Tensor) -> Tensor:
        """u, `[B, N, query_rank]`."""
        return normalised(self.q_down(x), self.q_norm)

    def forward(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """The absorbed queries `[B, H, N, rank + rotated]`, and the keys `[B, 1, N, rank + rotated]`."""
        q = self.q_up(self.query_latent(x)).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        plain, turned = q.split([self.of.plain, self.of.rotated], 3)
        latent, shared = self.kv_down(x).unsqueeze(1).split([self.of.rank, self.of.rotated], 3)
        turned, shared = rotated(rotation, turned, shared)
        q = torch.cat([plain @ self.k_up.to(plain.dtype), turned], 3)
        return q, torch.cat([normalised(latent, self.kv_norm), shared], 3)

    def values(self, mixed: Tensor) -> Tensor:
        """The heads' values `[B, H, N, value]` of mixed latent vectors `[B, H, N, rank]`."""
        return mixed @ self.v_up.to(mixed.dtype).mT
