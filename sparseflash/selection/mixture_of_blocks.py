"""`MixtureOfBlocks` (MoBA): each query head attends to the blocks with the highest-scoring mean keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseflash.attention import Backend
from sparseflash.blockmask.arguments import check_at_least_one
from sparseflash.masks.select_blocks import lists_of
from sparseflash.masks.tiling.columns import Columns
from sparseflash.nn.rotary import Rotary
from sparseflash.selection.attending import over_chosen
from sparseflash.selection.cache import SelectionCache, ended, of_blocks
from sparseflash.selection.frame import Frame
from sparseflash.selection.layer import SelectionLayer, checked_power


class MixtureOfBlocks(SelectionLayer):
    """Mixture of block attention: `[B, N, embed_dim] -> [B, N, embed_dim]`, causal.

    >>> layer = MixtureOfBlocks(64, 4, 2, block=32, chosen=4)
    >>> layer(torch.randn(2, 300, 64)).shape
    torch.Size([2, 300, 64])

    For a query q of a head at position t, with the blocks I_i of `block` keys:

        s_i   = q . mean(k_j for j in I_i)     -inf for blocks of the future, inf for the query's own   (paper: eq. 6)
        g_i   = 1 if s_i is among the `chosen` highest, else 0                                                 (eq. 5)
        out   = softmax(q K[I]^T) V[I],   I = the keys j <= t of all blocks with g_i = 1                    (eq. 2, 3)

    Args:
        embed_dim, num_heads, kv_heads: features of a token, query heads, and key heads. Each query head chooses for
            itself.
        block: keys of a block, a power of two from 16 to 4,096. The paper has 512 and 4,096.
        chosen: blocks of a query, its own included.
        qk_norm: normalise the features of queries and keys, with learned weights, before they are rotated.
        head_dim, bias, rotary, scale, backend: as for `nn.SparseSelfAttention`.

    The choice has no parameters and no gradient, so a model trained with dense attention can be continued with it.
    Choose small blocks: a mean of B keys of D features shows one matching key at a signal-to-noise ratio of about
    `sqrt(D / B)`, and below 2, blocks that hold a single matching key are missed.

    Source: Lu et al., 2025, arXiv 2502.13189, section 2.2.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, kv_heads: int | None = None, *, block: int = 64, chosen: int = 16,
        head_dim: int | None = None, bias: bool = False, qk_norm: bool = False, rotary: Rotary | None = None,
        scale: float | None = None, backend: Backend | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            embed_dim, num_heads, kv_heads, head_dim=head_dim, bias=bias, qk_norm=qk_norm, rotary=rotary, scale=scale,
            backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        self.block = self.aligned = checked_power(block, "block", most=4096)
        check_at_least_one(chosen=chosen)
        self.chosen = chosen

    def kept(self, capacity: int) -> dict[str, tuple[int, int, int]]:
        return {"means": (self.kv_heads, ended(capacity, self.block, self.block), self.head_dim)}

    def mix(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: SelectionCache | None
    ) -> Tensor:  # fmt: skip
        index = self.choice(q, k, frame, cache)
        return over_chosen(q, k, v, index, frame, self.how, span=self.block)

    @torch.no_grad()
    def choice(self, q: Tensor, k: Tensor, frame: Frame, cache: SelectionCache | None = None) -> Tensor:
        """The chosen blocks of each query of each head, `[B, Hq, N, chosen]`."""
        (means,) = of_blocks(lambda y, _: (y.mean(3),), {"means": k}, frame, cache, span=self.block, step=self.block)
        whole, blocks = ended(frame.k_len, self.block, self.block), -(-frame.k_len // self.block)
        means = F.pad(means[:, :, :whole], (0, 0, 0, blocks - whole))  # a block that has not ended is the query's own
        of = Columns(1, 1, 1, self.block, frame.q_len, frame.k_len, True, 0, 1)
        return lists_of(q, means, of, self.chosen, 1.0, frame.bounds, in_order=False)
