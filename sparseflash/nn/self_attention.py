"""`SparseSelfAttention`: tokens of a sequence attend to one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparseflash.attention import Backend, attention
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import check_at_least_one, checked_device, flag
from sparseflash.decode import FEW, attention_with_cache
from sparseflash.nn.heads import REMEDIES, Heads, check_features, check_input, padded, plain_weight
from sparseflash.nn.kv_cache import KVCache, check_device, length_on_host, next_places
from sparseflash.nn.layer_mask import Mask
from sparseflash.nn.multihead import check_plain, copy_projections
from sparseflash.nn.rotary import Rotary, Rotary2D, rotate
from sparseflash.remedies import refuse, without_others
from sparseflash.scores.change import Change, Scores


class SparseSelfAttention(Heads):
    """Multi-head self-attention over the live scores of a mask: `x [B, N, embed_dim] -> [B, N, embed_dim]`.

    >>> from functools import partial
    >>> from sparseflash import masks
    >>> near = partial(masks.local, window=32, causal=True)  # a function of the length serves any length
    >>> layer = SparseSelfAttention(64, 4, near, kv_heads=2, rotary=Rotary(16))
    >>> layer(torch.randn(2, 100, 64), lengths=torch.tensor([100, 70])).shape
    torch.Size([2, 100, 64])

    Token by token, with a cache:

    >>> with torch.inference_mode():
    ...     x, cache = torch.randn(2, 100, 64), layer.eval().new_cache(2, 128)
    ...     prompt, next = layer(x[:, :99], cache=cache), layer(x[:, 99:], cache=cache)
    ...     torch.allclose(torch.cat([prompt, next], 1), layer(x), atol=1e-5)
    True

    Args:
        embed_dim, num_heads: features of a token, and query heads.
        mask: a `BlockMask` for the longest sequence, cropped to its beginning for shorter ones; or a function that
            takes the length and returns a mask, such as `masks.causal`; None: all scores are live. It is moved to the
            device of x once, and is not in the `state_dict`.
        kv_heads: key and value heads; by default as many as query heads.
        head_dim: features of a head; by default `embed_dim / num_heads`.
        dropout: of the attention weights, when training.
        bias: of the projections.
        rotary: `Rotary` or `Rotary2D`, which rotates queries and keys.
        scale: factor of the scores, `1 / sqrt(head_dim)` by default.
        backend: as for `attention`.

    `qkv` projects to the features of query heads, key heads and value heads, in this order; `out` projects back.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mask: Mask = None,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        rotary: Rotary | Rotary2D | None = None,
        scale: float | None = None,
        backend: Backend | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, mask, kv_heads, head_dim, dropout, scale, backend)
        bias = flag(bias, "bias")
        if not (rotary is None or isinstance(rotary, Rotary | Rotary2D)):
            raise TypeError(f"rotary must be Rotary, Rotary2D or None; got {type(rotary).__name__}.")
        if rotary is not None and rotary.head_dim != self.head_dim:
            raise ValueError(f"rotary must be for heads of {self.head_dim} features; it is for {rotary.head_dim}.")
        features = (self.num_heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(embed_dim, features, bias=bias, device=device, dtype=dtype)
        self.out = nn.Linear(self.num_heads * self.head_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.rotary = rotary

    @classmethod
    def from_multihead(
        cls, module: nn.MultiheadAttention, mask: Mask = None, *, rotary: Rotary | Rotary2D | None = None,
        backend: Backend | None = None,
    ) -> SparseSelfAttention:  # fmt: skip
        """The same layer with the weights, dropout, device and mode of a `torch.nn.MultiheadAttention`.

        >>> theirs = nn.MultiheadAttention(64, 4, batch_first=True)
        >>> ours, x = SparseSelfAttention.from_multihead(theirs), torch.randn(2, 10, 64)
        >>> torch.allclose(ours(x), theirs(x, x, x)[0], atol=1e-5)
        True

        Frozen weights stay frozen. Raises ValueError for `add_bias_kv`, `add_zero_attn`, and keys of another width.
        """
        check_plain(module)
        weight = module.out_proj.weight
        made = cls(
            module.embed_dim, module.num_heads, mask, dropout=module.dropout, bias=module.in_proj_bias is not None,
            rotary=rotary, backend=backend, device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        copy_projections(module, (made.qkv,), made.out)
        return made.train(module.training)

    def new_cache(
        self, batch: int, capacity: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> KVCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, by default of the weights' dtype and device.

        Raises ValueError unless the layer's mask is causal for `capacity` tokens (a generated token cannot see later
        ones), has no lengths, has batch 1 or `batch`, and has one head or one for each query head.
        """
        check_at_least_one(batch=batch, capacity=capacity)
        device = checked_device(self.out.weight.device if device is None else device)
        self.mask.causal_of(batch, self.num_heads, capacity, device)
        dtype = self.out.weight.dtype if dtype is None else dtype
        return KVCache(batch, self.kv_heads, capacity, self.head_dim, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        positions: Tensor | None = None,
        mask: Mask = None,
        cache: KVCache | None = None,
        scores: Scores | Change | None = None,
        **others: Any,
    ) -> Tensor:
        """Attention within each sequence of x.

        Args:
            x: `[B, N, embed_dim]`.
            lengths: tokens of each sequence, integers `[B]`; later tokens are padding. They are not seen, their output
                is the bias of `out`, and their features must be finite.
            positions: of the tokens, for `rotary`, `[N]` or `[B, N]`; by default 0, 1, 2, ...
            mask: replaces the layer's mask.
            cache: x holds the tokens that follow the tokens in the cache, and is added to it. For inference only,
                without gradient and dropout; the layer's mask must be causal, and `lengths` and `mask` are refused. Up
                to 16 tokens are decoded without a plan (`decode.attention_with_cache`), but not with the backends
                `"hopper"` and `"blockwise"`.
            scores: score modifications, as for `attention`; with a cache, as for `decode.attention_with_cache`. A model
                keeps their learned tensors as parameters: `layer(x, scores=scores.alibi(self.slopes))`.
        """
        if others:
            refuse(others, "SparseSelfAttention", REMEDIES)
        check_input(x, "x", plain_weight(self.qkv), "lengths")
        check_features(x, "x", self.embed_dim)
        if not (cache is None or isinstance(cache, KVCache)):
            raise TypeError(f"cache must be a KVCache, as layer.new_cache makes it; got {type(cache).__name__}.")
        if cache is not None:
            check_device(cache, x)
        both, v = self.split(self.qkv(x), self.num_heads + self.kv_heads, self.kv_heads)
        places = None if cache is None else next_places(cache, x.shape[1])
        if self.rotary is not None:
            if positions is None:
                positions = torch.arange(x.shape[1], device=x.device) if places is None else places
            elif isinstance(positions, Tensor) and positions.device != x.device:
                raise ValueError(f"positions must be on x's device {x.device}; they are on {positions.device}.")
            rotation = self.rotary(positions)
            if positions.shape[-1] != x.shape[1] or positions.shape[:-1] not in ((), (1,), x.shape[:1]):
                raise ValueError(
                    f"positions must have shape [{x.shape[1]}] or [{x.shape[0]}, {x.shape[1]}]; got "
                    f"{list(positions.shape)}."
                )
            both = rotate(both, rotation)
        q, k = both.split([self.num_heads, self.kv_heads], 1)
        if cache is not None:
            if lengths is not None or mask is not None:
                raise ValueError("cache must not be given with lengths or a mask; got both.")
            return self._with_cache(q, k, v, cache, places, scores)
        own = self.mask_for(mask, x.shape[1], x.shape[1], x.device)
        own = padded(own, x.shape[1], x.shape[1], x.device, lengths=lengths)
        out: Tensor = self.out(self.attend(q, k, v, own, scores))
        return out

    without_others(forward)

    def _with_cache(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, places: Tensor | None, scores: Scores | Change | None
    ) -> Tensor:  # fmt: skip
        """If anything fails, the cache is left as it was."""
        if self.training or torch.is_grad_enabled():
            raise ValueError(
                "cache must be used for inference, without gradients: call layer.eval(), and the layer under "
                "torch.inference_mode() or torch.no_grad()."
            )
        mask = self.mask.causal_of(cache.k.shape[0], self.num_heads, cache.capacity, q.device)
        start = cache.length
        try:
            cache.append(k.to(cache.k.dtype), v.to(cache.v.dtype), places)
            mixed = self._attend_to_cache(q.to(cache.k.dtype), cache, mask, scores).to(q.dtype)
            out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        except BaseException:
            cache.truncate(start)  # otherwise the tokens would be there twice when the call is made again
            raise
        return out

    def _attend_to_cache(
        self, q: Tensor, cache: KVCache, mask: BlockMask, scores: Scores | Change | None
    ) -> Tensor:  # fmt: skip
        """Attention of the queries [B, Hq, N, D] of the last tokens of a cache."""
        if q.shape[2] == 0:
            return q
        backend = self.backend
        if q.shape[2] <= min(FEW, mask.block_q) and (backend is None or backend == "triton" or backend == "reference"):
            return attention_with_cache(
                q, cache.k, cache.v, cache.lengths, mask=mask, scores=scores, scale=self.scale, backend=backend
            )
        stop = length_on_host(cache)
        return attention(
            q, cache.k[:, :, :stop], cache.v[:, :, :stop], mask.crop(q=(stop - q.shape[2], stop), k=(0, stop)),
            scale=self.scale, scores=scores, backend=backend,
        )  # fmt: skip
