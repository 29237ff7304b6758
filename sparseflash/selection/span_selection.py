"""`SpanSelection` (QSA): all heads attend to spans of a few tokens that an indexer scores by their mean key."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparseflash.attention import Backend
from sparseflash.blockmask.arguments import check_at_least_one
from sparseflash.nn.rotary import Rotary
from sparseflash.selection.attending import over_chosen
from sparseflash.selection.cache import SelectionCache, ended, of_blocks
from sparseflash.selection.choice import best_blocks, by_operations, candidates_of, held, summed
from sparseflash.selection.frame import Frame
from sparseflash.selection.indexer import IndexedLayer, Teach
from sparseflash.selection.layer import checked_power, normalised, rotated


class SpanSelection(IndexedLayer):
    """Qwen sparse attention: `[B, N, embed_dim] -> [B, N, embed_dim]`, causal.

    >>> layer = SpanSelection(64, 4, 2, chosen=16, index_heads=2, index_dim=16)
    >>> out = layer(torch.randn(2, 300, 64))
    >>> (out.square().mean() + layer.loss).backward()  # in training, add the indexer's loss

    For the query at position t, and spans b of r tokens that have ended, r (b + 1) <= t + 1:

        k_b   = norm(mean(x_s W_k for the r tokens of span b))
        I_t,b = sum over h of ReLU(norm(x_t W_q^h) . k_b) / sqrt(d)
        out   = attention to the spans with the `chosen` highest I_t,b, the earlier of equals, and to the tokens after
                the last span that has ended
        loss  = mean over t of KL(p_t || softmax(I_t))

    p_t,b: attention weights, summed over the query heads; the largest of the tokens of span b; normalised over b.

    Args:
        embed_dim, num_heads, kv_heads: features of a token, query heads, and key heads. All share a choice.
        span, chosen: r, a power of two up to 256; and spans of a query.
        index_heads, index_dim: the indexer's query heads, and d.
        teach: the loss is over `"visible"` spans or over `"chosen"` ones.
        taught: the loss is a mean over this many random queries; None: all. Their scores of all keys dominate the time.
        qk_norm: normalise the features of queries and keys, with learned weights, before they are rotated.
        head_dim, bias, rotary, scale, backend: as for `nn.SparseSelfAttention`. `rotary` also rotates the indexer's
            queries, and its keys k_b at the position of their first token.

    Source: Qwen3.8-Flash-Next's `Qwen4ExpTextQSAIndexer` in Transformers (2026); its sizes are the defaults. The
    model's layer also has norms of queries and keys and a gate of its output.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, kv_heads: int | None = None, *, span: int = 4, chosen: int = 512,
        index_heads: int = 4, index_dim: int = 128, teach: Teach = "visible", taught: int | None = None,
        head_dim: int | None = None, bias: bool = False, qk_norm: bool = False, rotary: Rotary | None = None,
        scale: float | None = None, backend: Backend | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            embed_dim, num_heads, kv_heads, head_dim=head_dim, bias=bias, qk_norm=qk_norm, rotary=rotary, scale=scale,
            backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        self.span = self.aligned = checked_power(span, "span", least=1)
        check_at_least_one(chosen=chosen)
        self.chosen = chosen
        self.make_indexer(index_heads, index_dim, teach, taught, device, dtype)
        self.index_norm_q = nn.RMSNorm(index_dim, device=device, dtype=dtype)
        self.index_norm_k = nn.RMSNorm(index_dim, device=device, dtype=dtype)

    def kept(self, capacity: int) -> dict[str, tuple[int, int, int]]:
        return {
            "index_k": (1, capacity, self.index_dim),
            "spans": (1, ended(capacity, self.span, self.span), self.index_dim),
        }

    def mix(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: SelectionCache | None
    ) -> Tensor:  # fmt: skip
        (index_q,) = rotated(self.index_rotation(frame), self.index_queries(x, self.index_norm_q))
        index_k = frame.joined(self.index_k(x.detach()).unsqueeze(1))
        if cache is not None:
            index_k = cache.write("index_k", frame.new_places, index_k)
        (spans,) = of_blocks(
            lambda y, places: rotated(self.index_rotation(frame, places), normalised(y.mean(3), self.index_norm_k)),
            {"spans": index_k}, frame, cache, span=self.span, step=self.span,
        )  # fmt: skip
        spans = spans[:, :, : ended(frame.k_len, self.span, self.span)]
        index = self.choice(index_q, spans, frame)
        if self.teaches:
            self.loss = self.distillation(q, k, index_q, spans, index, frame)
        return over_chosen(q, k, v, index, frame, self.how, span=self.span)

    def choice(self, index_q: Tensor, spans: Tensor, frame: Frame) -> Tensor:
        """The chosen spans of each query and the span that it is in, if that has not ended: `[B, 1, N, chosen + 1]`."""
        ones = index_q.new_ones(()).expand(index_q.shape[:3])
        of = candidates_of(frame, self.span, whole=True)
        index = best_blocks(
            lambda rows: summed(index_q, spans, ones, of, rows), of, blocks=spans.shape[2], k=self.chosen,
            per_row=held(index_q, spans),
        )  # fmt: skip
        place = frame.places(slice(None))
        tail = (place // self.span).masked_fill((place + 1) % self.span == 0, -1)
        return torch.cat([index, tail.to(index.dtype).expand(*index.shape[:3], 1)], 3)

    def distillation(
        self, q: Tensor, k: Tensor, index_q: Tensor, spans: Tensor, index: Tensor, frame: Frame
    ) -> Tensor:  # fmt: skip
        q, k, (batch, _, count, _) = q.detach(), k.detach(), spans.shape
        factor = index_q.new_full((), self.index_dim**-0.5).expand(index_q.shape[:3])
        number = torch.arange(count, device=q.device)

        def of_spans(weights: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
            best = weights.sum(1, keepdim=True).unflatten(3, (-1, self.span)).amax(4).masked_fill(~live, 0.0)
            total = best.sum(-1, keepdim=True)
            return best / total.masked_fill(total == 0.0, 1.0), live

        if self.teach == "visible" or not count:

            def of_visible(rows: Tensor) -> tuple[Tensor, Tensor]:
                weights = self.visible_weights(q, k, frame, rows)[..., : count * self.span]
                ended = number < (frame.places(rows) + 1) // self.span
                return of_spans(weights, (ended & (number >= frame.firsts(rows) // self.span))[None, None])

            return self.divergence(
                of_visible, lambda rows: by_operations(index_q[:, :, rows], spans, factor[:, :, rows]), frame,
                batch * self.num_heads * frame.k_len,
            )  # fmt: skip

        ended = index[..., :-1]

        def of_chosen(rows: Tensor) -> tuple[Tensor, Tensor]:
            # The tokens are ascending, so the tokens of the last span, which has not ended, follow all others.
            weights, _ = self.chosen_weights(q, k, index[:, :, rows], frame, rows, self.span)
            return of_spans(weights[..., : -self.span], ended[:, :, rows] >= 0)

        def scores_of(rows: Tensor) -> Tensor:
            products = self.scores_of_chosen(index_q[:, :, rows], spans, ended[:, :, rows], self.index_dim**-0.5)
            return products.relu().sum(1, keepdim=True)

        return self.divergence(of_chosen, scores_of, frame, batch * self.num_heads * index.shape[3] * self.span)
