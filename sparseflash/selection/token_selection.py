"""`TokenSelection` (DSA): all heads attend to the single tokens that a lightning indexer scores highest."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparseflash.attention import Backend
from sparseflash.blockmask.arguments import check_at_least_one
from sparseflash.nn.rotary import Rotary
from sparseflash.selection.attending import over_chosen
from sparseflash.selection.cache import SelectionCache
from sparseflash.selection.choice import best_blocks, by_operations, candidates_of, held, summed
from sparseflash.selection.frame import Frame
from sparseflash.selection.indexer import IndexedLayer, Teach
from sparseflash.selection.layer import normalised


class TokenSelection(IndexedLayer):
    """DeepSeek sparse attention: `[B, N, embed_dim] -> [B, N, embed_dim]`, causal.

    >>> layer = TokenSelection(64, 4, chosen=32, index_heads=4, index_dim=16)  # one key head for all query heads
    >>> out = layer(torch.randn(2, 300, 64))
    >>> (out.square().mean() + layer.loss).backward()  # in training, add the indexer's loss

    For the query at position t, with the indexer's queries q^I, weights w and keys k^I:

        I_t,s = sum over j of w_t,j * ReLU(q^I_t,j . k^I_s)                                            (paper: eq. 1)
        out   = attention to the tokens s <= t with the `chosen` highest I_t,s, the earlier of equals          (eq. 2)
        loss  = mean over t of KL(p_t || softmax(I_t))                                                     (eq. 3, 4)

    p_t: attention weights, summed over the query heads and normalised, over all visible tokens (eq. 3, while the
    indexer warms up) or over the chosen ones (eq. 4). w is a projection of x, over `sqrt(index_heads * index_dim)`.

    Args:
        embed_dim, num_heads, kv_heads: features of a token, query heads, and key heads, by default one. All share a
            choice.
        chosen: tokens of a query.
        index_heads, index_dim: the indexer's query heads, and the features of its queries and keys.
        teach: the loss is over `"visible"` keys or over `"chosen"` ones.
        taught: the loss is a mean over this many random queries; None: all. Their scores of all keys dominate the time.
        qk_norm: normalise the features of queries and keys, with learned weights, before they are rotated.
        head_dim, bias, rotary, scale, backend: as for `nn.SparseSelfAttention`. `rotary` also rotates the indexer's
            queries and keys.

    The model's own layer projects keys and values to a latent vector first, and the indexer's queries from the latent
    vector of the queries. Here they are projections of x.

    Source: DeepSeek-AI, 2025, DeepSeek-V3.2-Exp, section 1; its sizes are the defaults.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, kv_heads: int = 1, *, chosen: int = 2048, index_heads: int = 64,
        index_dim: int = 128, teach: Teach = "visible", taught: int | None = None, head_dim: int | None = None,
        bias: bool = False, qk_norm: bool = False, rotary: Rotary | None = None, scale: float | None = None,
        backend: Backend | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            embed_dim, num_heads, kv_heads, head_dim=head_dim, bias=bias, qk_norm=qk_norm, rotary=rotary, scale=scale,
            backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        check_at_least_one(chosen=chosen)
        self.chosen = chosen
        self.make_indexer(index_heads, index_dim, teach, taught, device, dtype)
        self.index_norm_k = nn.LayerNorm(index_dim, device=device, dtype=dtype)
        self.weights = nn.Linear(embed_dim, index_heads, bias=False, device=device, dtype=dtype)

    def kept(self, capacity: int) -> dict[str, tuple[int, int, int]]:
        return {"index_k": (1, capacity, self.index_dim)}

    def mix(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: SelectionCache | None
    ) -> Tensor:  # fmt: skip
        """See `SelectionLayer.mix`."""
        index_q = self.index_queries(x, frame)
        weights = self.weights(x.detach()).transpose(1, 2) * (self.index_heads * self.index_dim) ** -0.5  # [B, Hi, N]
        new = torch.arange(frame.start, frame.k_len, device=x.device)
        index_k = self.rotated(normalised(self.index_k(x.detach()), self.index_norm_k).unsqueeze(1), frame, new)
        if cache is not None:
            index_k = cache.write("index_k", frame.start, index_k)[:, :, : frame.k_len]
        index = self.choice(index_q, weights, index_k, frame)
        if self.teaches:
            self.loss = self.distillation(q, k, (index_q, weights, index_k), index, frame)
        return over_chosen(q, k, v, index, frame, self.how, span=1)

    def choice(self, index_q: Tensor, weights: Tensor, index_k: Tensor, frame: Frame) -> Tensor:
        """The chosen tokens of each query, `[B, 1, N, chosen]`."""
        of = candidates_of(frame, 1)
        return best_blocks(
            lambda rows: summed(index_q, index_k, weights, of, rows), of, blocks=frame.k_len, k=self.chosen,
            per_row=held(index_q, index_k),
        )  # fmt: skip

    def distillation(
        self, q: Tensor, k: Tensor, indexer: tuple[Tensor, Tensor, Tensor], index: Tensor, frame: Frame
    ) -> Tensor:  # fmt: skip
        """The indexer's loss."""
        q, k, (index_q, weights, index_k) = q.detach(), k.detach(), indexer
        if self.teach == "visible":
            return self.divergence(
                lambda rows: (self.visible_weights(q, k, frame, rows).mean(1, keepdim=True), frame.visible(rows)),
                lambda rows: by_operations(index_q[:, :, rows], index_k, weights[:, :, rows]), frame,
                q.shape[0] * max(self.num_heads, self.index_heads) * frame.k_len,
            )  # fmt: skip

        def target_of(rows: Tensor) -> tuple[Tensor, Tensor]:
            found, tokens = self.chosen_weights(q, k, index[:, :, rows], frame, rows)
            return found.mean(1, keepdim=True), tokens[:, :1] >= 0

        def scores_of(rows: Tensor) -> Tensor:
            products = self.scores_of_chosen(index_q[:, :, rows], index_k, index[:, :, rows], 1.0)
            return (products.relu() * weights[:, :, rows].unsqueeze(3)).sum(1, keepdim=True)

        heads = self.num_heads + self.index_heads
        return self.divergence(target_of, scores_of, frame, q.shape[0] * heads * index.shape[3])
