"""What the layers with an indexer share: its projections, and the loss that teaches it the attention weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparseflash.blockmask.arguments import check_at_least_one
from sparseflash.nn.rotary import Rotary, Rotation
from sparseflash.selected_tokens import token_scores
from sparseflash.selection.cache import SelectionCache
from sparseflash.selection.choice import chunks, tokens_of
from sparseflash.selection.frame import Frame
from sparseflash.selection.layer import SelectionLayer, normalised, rotated

Teach = Literal["visible", "chosen"]


class IndexedLayer(SelectionLayer):
    """A layer whose small queries and keys score all tokens. In training, `loss` is the indexer's loss of the last
    call; after a call without gradients, or in `eval()`, it is None.

    The indexer sees x without its gradient, and the choice has none: the indexer learns from `loss` alone. Add it to
    the model's loss.
    """

    loss: Tensor | None
    index_heads: int

    def make_indexer(
        self, index_heads: int, index_dim: int, teach: Teach, taught: int | None, device: torch.device | str | None,
        dtype: torch.dtype | None, query_features: int | None = None,
    ) -> None:  # fmt: skip
        check_at_least_one(
            index_heads=index_heads, index_dim=index_dim, **({} if taught is None else {"taught": taught})
        )
        if teach not in ("visible", "chosen"):
            raise ValueError(f"teach must be 'visible' or 'chosen'; got {teach!r}.")
        self.index_heads, self.index_dim = index_heads, index_dim
        self.teach, self.taught, self.loss = teach, taught, None
        query_features = self.embed_dim if query_features is None else query_features
        self.index_q = nn.Linear(query_features, index_heads * index_dim, bias=False, device=device, dtype=dtype)
        self.index_k = nn.Linear(self.embed_dim, index_dim, bias=False, device=device, dtype=dtype)
        self.index_rotary = self.rotary
        if self.rotary is not None and self.rotary.head_dim != index_dim:
            self.index_rotary = Rotary(index_dim, base=self.rotary.base)

    def __getstate__(self) -> dict[str, Any]:
        # Copies begin without the loss, which holds its graph: PyTorch refuses to copy it.
        return {**super().__getstate__(), "loss": None}  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        # Not the loss of an earlier call, also where no token comes.
        self.loss = torch.zeros((), device=self.index_k.weight.device) if self.teaches else None

    def index_rotation(self, frame: Frame, places: Tensor | None = None) -> Rotation | None:
        """The rotation of the indexer's queries or keys at these places; by default, of the new tokens."""
        if places is None and self.index_rotary is self.rotary:
            return frame.rotation
        if self.index_rotary is None:
            return None
        found: Rotation = self.index_rotary(frame.positions(frame.new_places if places is None else places))
        return found

    def index_queries(self, x: Tensor, norm: nn.RMSNorm | None = None) -> Tensor:
        """The indexer's queries `[B, Hi, N, d]`, not rotated."""
        q: Tensor = self.index_q(x.detach()).unflatten(2, (self.index_heads, -1)).transpose(1, 2)
        return q if norm is None else normalised(q, norm)

    def with_keys(
        self, q: Tensor, x: Tensor, norm: nn.RMSNorm | nn.LayerNorm, frame: Frame, cache: SelectionCache | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The indexer's queries, and its keys `[B, 1, Nk, d]`: those of x behind those of earlier tokens, which are
        kept. Both are rotated.
        """
        k = normalised(self.index_k(x.detach()), norm).unsqueeze(1)
        q, k = rotated(self.index_rotation(frame), q, k)
        k = frame.joined(k)
        return q, k if cache is None else cache.write("index_k", frame.new_places, k)[:, :, : frame.k_len]

    @property
    def teaches(self) -> bool:
        """Whether this call computes the indexer's loss."""
        return self.training and torch.is_grad_enabled()

    def visible_weights(self, q: Tensor, k: Tensor, frame: Frame, rows: Tensor) -> Tensor:
        """The weights `[B, Hq, rows, Nk]` of some queries over all visible keys."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        scores: Tensor = q[:, :, rows].unflatten(1, (self.kv_heads, -1)) @ k.unsqueeze(2).mT * scale
        scores = scores.flatten(1, 2).to(torch.promote_types(q.dtype, torch.float32))
        return scores.masked_fill(~frame.visible(rows), -torch.inf).softmax(-1)

    def chosen_weights(
        self, q: Tensor, k: Tensor, index: Tensor, frame: Frame, rows: Tensor, span: int = 1
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The weights `[B, Hq, rows, n]` of some queries over their chosen tokens, and these `[B, Hkv, rows, n]`.

        index: the blocks of `span` tokens of these queries. The tokens are in ascending order, with -1 for none.
        """
        tokens = tokens_of(index, span)
        tokens = tokens.masked_fill(tokens > frame.places(rows), -1).expand(-1, self.kv_heads, -1, -1)
        scores, tokens = token_scores(
            q[:, :, rows], k, tokens, causal=False, scale=self.scale, backend=self.how.decoder
        )  # fmt: skip
        return scores.softmax(-1), tokens

    def scores_of_chosen(self, index_q: Tensor, index_k: Tensor, index: Tensor, scale: float) -> Tensor:
        """The indexer's products `[B, Hi, rows, n]` with the keys that `index` lists, in ascending order."""
        index_k = index_k.expand(-1, index.shape[1], -1, -1)
        return token_scores(index_q, index_k, index, causal=False, scale=scale, backend=self.how.decoder)[0]

    def divergence(
        self, target_of: Callable[[Tensor], tuple[Tensor, Tensor]], scores_of: Callable[[Tensor], Tensor], frame: Frame,
        per_row: int,
    ) -> Tensor:  # fmt: skip
        """The mean over queries, sequences and heads of KL(target || softmax(scores)).

        Args:
            target_of: takes numbers of queries and returns weights `[B, H, rows, n]`, and which of the n are taught.
            scores_of: the indexer's scores of the same shape.
            per_row: scores in memory for a query.

        With a context it is this rank's part of that mean; with `taught`, the mean over that many random queries. The
        scores of each chunk of queries are computed again in the backward, which saves memory.
        """
        rows = frame.rows
        if self.taught is not None and self.taught < len(rows):
            rows = rows[torch.randperm(len(rows), device=rows.device)[: self.taught]]

        def of_chunk(some: Tensor) -> Tensor:
            with torch.no_grad():
                target, live = target_of(some)
            logs = scores_of(some).to(target.dtype).masked_fill(~live, -torch.inf).log_softmax(-1)
            # A query without keys to be taught has NaN there, in the backward too, and is filled with zeros.
            logs = logs.masked_fill(~live, 0.0)
            return (torch.xlogy(target, target) - target * logs).sum(-1).mean((0, 1)).sum()

        parts = [checkpoint(of_chunk, rows[part], use_reentrant=False) for part in chunks(len(rows), per_row)]
        return torch.stack(parts).sum() / len(rows) * frame.share
