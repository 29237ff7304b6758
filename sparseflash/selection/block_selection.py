"""`BlockSelection` (MSA): the query heads of a group attend to blocks that an indexer scores by their best key."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparseflash.attention import Backend
from sparseflash.blockmask.arguments import check_at_least_one, integer
from sparseflash.masks.select_blocks import lists_of
from sparseflash.masks.tiling.columns import Columns
from sparseflash.nn.rotary import Rotary
from sparseflash.selection.attending import over_chosen
from sparseflash.selection.cache import SelectionCache
from sparseflash.selection.choice import tokens_of
from sparseflash.selection.frame import Frame
from sparseflash.selection.indexer import IndexedLayer, Teach
from sparseflash.selection.layer import checked_power


class BlockSelection(IndexedLayer):
    """MiniMax sparse attention: `[B, N, embed_dim] -> [B, N, embed_dim]`, causal.

    >>> layer = BlockSelection(64, 4, 2, block=32, chosen=4, index_dim=16)
    >>> out = layer(torch.randn(2, 300, 64))
    >>> (out.square().mean() + layer.loss).backward()  # in training, add the indexer's loss

    For the query at position t, and each key head g with its group of query heads:

        I_t,s^g = norm(x_t W_q^g) . norm(x_s W_k) / sqrt(d)             one query for each key head, one key for all
        M_t,b^g = max(I_t,s^g for keys s <= t of block b)
        out     = attention to the keys of the blocks with the `chosen` highest M_t^g, the query's own block always

    and the indexer learns from

        loss = mean over t and g of KL(p_t^g || softmax(I_t^g)),    p_t^g = the mean attention weights of the group

    over all visible keys, or over the chosen ones.

    Args:
        embed_dim, num_heads, kv_heads: features of a token, query heads, and key heads; the query heads of a key head
            share a choice.
        block, chosen: keys of a block, a power of two from 16 to 256; and blocks of a query, its own included.
        index_dim: d.
        first: blocks at the beginning of the sequence that are always chosen.
        teach: the loss is over `"visible"` keys, as while the indexer warms up, or over `"chosen"` ones.
        taught: the loss is a mean over this many random queries; None: all. Their scores of all keys dominate the time.
        qk_norm: normalise the features of queries and keys, with learned weights, before they are rotated.
        head_dim, bias, rotary, scale, backend: as for `nn.SparseSelfAttention`. `rotary` also rotates the indexer's
            queries and keys.

    Source: Lai et al., 2026, MiniMax Sparse Attention, arXiv 2606.13392; its sizes are the defaults.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, kv_heads: int | None = None, *, block: int = 128, chosen: int = 16,
        index_dim: int = 128, first: int = 0, teach: Teach = "visible", taught: int | None = None,
        head_dim: int | None = None, bias: bool = False, qk_norm: bool = False, rotary: Rotary | None = None,
        scale: float | None = None, backend: Backend | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            embed_dim, num_heads, kv_heads, head_dim=head_dim, bias=bias, qk_norm=qk_norm, rotary=rotary, scale=scale,
            backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        self.block = self.aligned = checked_power(block, "block")
        check_at_least_one(chosen=chosen)
        if integer(first, "first", "blocks") < 0 or first + 1 > chosen:
            raise ValueError(f"chosen must be at least first + 1, {first} and the query's own block; got {chosen}.")
        self.chosen, self.first = chosen, first
        self.make_indexer(self.kv_heads, index_dim, teach, taught, device, dtype)
        self.index_norm_q = nn.RMSNorm(index_dim, device=device, dtype=dtype)
        self.index_norm_k = nn.RMSNorm(index_dim, device=device, dtype=dtype)

    def kept(self, capacity: int) -> dict[str, tuple[int, int, int]]:
        return {"index_k": (1, capacity, self.index_dim)}

    def mix(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: SelectionCache | None
    ) -> Tensor:  # fmt: skip
        index_q = self.index_queries(x, self.index_norm_q)
        index_q, index_k = self.with_keys(index_q, x, self.index_norm_k, frame, cache)
        index = self.choice(index_q, index_k, frame)
        if self.teaches:
            self.loss = self.distillation(q, k, index_q, index_k, index, frame)
        return over_chosen(q, k, v, index, frame, self.how, span=self.block)

    def choice(self, index_q: Tensor, index_k: Tensor, frame: Frame) -> Tensor:
        """The chosen blocks of each query, `[B, Hkv, N, chosen]`."""
        of = Columns(1, 1, self.block, 1, frame.q_len, frame.k_len, True, self.first, 1)
        return lists_of(index_q, index_k, of, self.chosen, 1.0, frame.bounds, in_order=False)

    def distillation(
        self, q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, index: Tensor, frame: Frame
    ) -> Tensor:  # fmt: skip
        """The indexer's loss."""
        q, k, scale = q.detach(), k.detach(), self.index_dim**-0.5

        def of_groups(weights: Tensor) -> Tensor:
            return torch.mean(weights.unflatten(1, (self.kv_heads, -1)), 2)

        if self.teach == "visible":
            return self.divergence(
                lambda rows: (of_groups(self.visible_weights(q, k, frame, rows)), frame.visible(rows)),
                lambda rows: index_q[:, :, rows] @ index_k.mT * scale, frame,
                q.shape[0] * self.num_heads * frame.k_len,
            )  # fmt: skip

        def target_of(rows: Tensor) -> tuple[Tensor, Tensor]:
            weights, tokens = self.chosen_weights(q, k, index[:, :, rows], frame, rows, self.block)
            return of_groups(weights), tokens >= 0

        def scores_of(rows: Tensor) -> Tensor:
            tokens = tokens_of(index[:, :, rows], self.block)
            tokens = tokens.masked_fill(tokens > frame.places(rows), -1)
            return self.scores_of_chosen(index_q[:, :, rows], index_k, tokens, scale)

        return self.divergence(target_of, scores_of, frame, q.shape[0] * self.num_heads * index.shape[3] * self.block)
