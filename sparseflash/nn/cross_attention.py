"""`SparseCrossAttention`: tokens of one sequence attend to another sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparseflash.attention import Backend
from sparseflash.blockmask.arguments import check_at_least_one, flag
from sparseflash.nn.heads import REMEDIES, Heads, check_features, check_input, padded, plain_weight
from sparseflash.nn.layer_mask import Mask
from sparseflash.nn.multihead import check_plain, copy_projections
from sparseflash.remedies import refuse, without_others
from sparseflash.scores.change import Change, Scores


class SparseCrossAttention(Heads):
    """Multi-head attention of `x [B, Nq, embed_dim]` to a `context [B, Nk, context_dim]`: `[B, Nq, embed_dim]`.

    >>> from sparseflash import masks
    >>> layer = SparseCrossAttention(64, 4, context_dim=32)
    >>> context_lengths = torch.tensor([50, 20])
    >>> layer(torch.randn(2, 10, 64), torch.randn(2, 50, 32), context_lengths=context_lengths).shape
    torch.Size([2, 10, 64])

    Args:
        embed_dim, num_heads: features of a token of x, and query heads.
        mask: a `BlockMask` of queries and keys, cropped to its beginning for shorter sequences; or a function of the
            lengths (of one, if they are equal) that returns a mask, such as `masks.causal` or `lambda *lengths:
            masks.local(*lengths, window=64)`; or a rule of positions `(q, k)`; None: all scores are live.
        context_dim: features of a token of the context; by default `embed_dim`.
        kv_heads, head_dim, dropout, bias, scale, backend: as for `SparseSelfAttention`.

    `q` projects x; `kv` projects the context to the features of key heads and value heads; `out` projects back.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mask: Mask = None,
        *,
        context_dim: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        scale: float | None = None,
        backend: Backend | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, mask, kv_heads, head_dim, dropout, scale, backend)
        bias = flag(bias, "bias")
        self.context_dim = embed_dim if context_dim is None else context_dim
        check_at_least_one(context_dim=self.context_dim)
        q_features, kv_features = self.num_heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        self.q = nn.Linear(embed_dim, q_features, bias=bias, device=device, dtype=dtype)
        self.kv = nn.Linear(self.context_dim, kv_features, bias=bias, device=device, dtype=dtype)
        self.out = nn.Linear(q_features, embed_dim, bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_multihead(
        cls, module: nn.MultiheadAttention, mask: Mask = None, *, backend: Backend | None = None
    ) -> SparseCrossAttention:
        """The same layer with the weights, dropout, device and mode of a `torch.nn.MultiheadAttention`.

        >>> theirs = nn.MultiheadAttention(64, 4, kdim=32, vdim=32, batch_first=True)
        >>> x, context = torch.randn(2, 10, 64), torch.randn(2, 50, 32)
        >>> ours = SparseCrossAttention.from_multihead(theirs)
        >>> torch.allclose(ours(x, context), theirs(x, context, context)[0], atol=1e-5)
        True

        Frozen weights stay frozen. Raises ValueError for `add_bias_kv`, `add_zero_attn`, and keys and values of
        different widths.
        """
        check_plain(module)
        weight = module.out_proj.weight
        made = cls(
            module.embed_dim, module.num_heads, mask, context_dim=module.kdim, dropout=module.dropout,
            bias=module.in_proj_bias is not None, backend=backend, device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        copy_projections(module, (made.q, made.kv), made.out)
        return made.train(module.training)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        context_lengths: Tensor | Sequence[int] | None = None,
        mask: Mask = None,
        scores: Scores | Change | None = None,
        **others: Any,
    ) -> Tensor:
        """Attention of x to the context.

        Args:
            x, context: `[B, Nq, embed_dim]` and `[B, Nk, context_dim]`.
            lengths, context_lengths: tokens of each sequence, integers `[B]`; later tokens are padding.
            mask: replaces the layer's mask.
            scores: score modifications, as for `attention`.
        """
        if others:
            refuse(others, "SparseCrossAttention", REMEDIES)
        check_input(x, "x", plain_weight(self.q), "lengths")
        check_input(context, "context", plain_weight(self.kv), "context_lengths")
        check_features(x, "x", self.embed_dim)
        check_features(context, "context", self.context_dim)
        (q,) = self.split(self.q(x), self.num_heads)
        k, v = self.split(self.kv(context), self.kv_heads, self.kv_heads)
        q_len, k_len, device = x.shape[1], context.shape[1], x.device
        own = self.mask_for(mask, q_len, k_len, device)
        own = padded(own, q_len, k_len, device, q_lengths=lengths, k_lengths=context_lengths)
        out: Tensor = self.out(self.attend(q, k, v, own, scores))
        return out

    without_others(forward)
