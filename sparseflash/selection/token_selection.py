"""`TokenSelection` (DSA): all heads attend to the single tokens that a lightning indexer scores highest."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparseflash.attention import Backend
from sparseflash.blockmask.arguments import check_at_least_one
from sparseflash.nn.rotary import Rotary
from sparseflash.selection.attending import over_chosen, over_latent
from sparseflash.selection.cache import SelectionCache
from sparseflash.selection.choice import best_blocks, by_operations, candidates_of, held, summed
from sparseflash.selection.frame import Frame
from sparseflash.selection.indexer import IndexedLayer, Teach
from sparseflash.selection.latent import Latent, LatentProjections


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
        latent: the sizes of multi-head latent attention, as the model's own layer has it: see `LatentProjections`.
            The indexer's queries are then projections of u. The cache holds `rank + rotated` numbers a token, besides
            the indexer's keys. Then `rotary` must be for heads of `latent.rotated` features, the scale is by default
            `1 / sqrt(plain + rotated)`, and kv_heads, head_dim, bias and qk_norm must not be given.
        head_dim, bias, rotary, scale, backend: as for `nn.SparseSelfAttention`. `rotary` also rotates the indexer's
            queries and keys.

    Source: DeepSeek-AI, 2025, DeepSeek-V3.2-Exp, section 1; its sizes are the defaults.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, kv_heads: int = 1, *, chosen: int = 2048, index_heads: int = 64,
        index_dim: int = 128, teach: Teach = "visible", taught: int | None = None, latent: Latent | None = None,
        head_dim: int | None = None, bias: bool = False, qk_norm: bool = False, rotary: Rotary | None = None,
        scale: float | None = None, backend: Backend | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if latent is not None:
            if not isinstance(latent, Latent):
                raise TypeError(f"latent must be selection.Latent or None; got {type(latent).__name__}.")
            if (kv_heads, head_dim, bias, qk_norm) != (1, None, False, False):
                raise ValueError(
                    "kv_heads, head_dim, bias and qk_norm must not be given with latent: all heads read one latent "
                    "key, without biases, and the latent vectors are normalised."
                )
            head_dim, scale = latent.key, (latent.plain + latent.rotated) ** -0.5 if scale is None else scale
        self._sizes = latent
        super().__init__(
            embed_dim, num_heads, kv_heads, head_dim=head_dim, bias=bias, qk_norm=qk_norm, rotary=rotary, scale=scale,
            backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        check_at_least_one(chosen=chosen)
        self.chosen = chosen
        query_features = None if latent is None else latent.query_rank
        self.make_indexer(index_heads, index_dim, teach, taught, device, dtype, query_features)
        self.index_norm_k = nn.LayerNorm(index_dim, device=device, dtype=dtype)
        self.weights = nn.Linear(embed_dim, index_heads, bias=False, device=device, dtype=dtype)

    def make_projections(
        self, bias: bool, qk_norm: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:  # fmt: skip
        if self._sizes is None:
            return super().make_projections(bias, qk_norm, device, dtype)
        self.value_dim = 0
        self.latent = LatentProjections(self.embed_dim, self.num_heads, self._sizes, device, dtype)
        self.out = nn.Linear(
            self.num_heads * self._sizes.value, self.embed_dim, bias=False, device=device, dtype=dtype
        )  # fmt: skip
        return None

    @property
    def rotated_dim(self) -> int:
        return self.head_dim if self._sizes is None else self._sizes.rotated

    def project(self, x: Tensor, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        if self._sizes is None:
            return super().project(x, frame)
        q, k = self.latent(x, frame.rotation)
        return q, k, k[..., :0]

    def merged(self, mixed: Tensor) -> Tensor:
        return super().merged(mixed if self._sizes is None else self.latent.values(mixed))

    def kept(self, capacity: int) -> dict[str, tuple[int, int, int]]:
        return {"index_k": (1, capacity, self.index_dim)}

    def mix(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: SelectionCache | None
    ) -> Tensor:  # fmt: skip
        index_q = self.index_queries(x if self._sizes is None else self.latent.query_latent(x))
        weights = self.weights(x.detach()).transpose(1, 2) * (self.index_heads * self.index_dim) ** -0.5  # [B, Hi, N]
        index_q, index_k = self.with_keys(index_q, x, self.index_norm_k, frame, cache)
        index = self.choice(index_q, weights, index_k, frame)
        if self.teaches:
            self.loss = self.distillation(q, k, (index_q, weights, index_k), index, frame)
        if self._sizes is not None:
            return over_latent(q, k, index, frame, self.how, v_dim=self._sizes.rank)
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
