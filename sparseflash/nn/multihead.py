"""`MultiheadAttention`: in place of `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparseflash.attention import Backend, attention
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import check_at_least_one, flag
from sparseflash.nn.heads import check_dropout, check_input
from sparseflash.nn.layer_mask import LayerMask, Mask
from sparseflash.remedies import refuse, without_others
from sparseflash.scaled_dot_product import live_and_bias, upper_left
from sparseflash.scores.bias import Bias, bias

_BLOCK = 128
_PADDING = (
    "key_padding_mask; a torch.nn.TransformerEncoder makes nested tensors of padded inputs unless you set its "
    "use_nested_tensor = False"
)

_OWN = "it has the arguments of PyTorch's own layer. Use SparseSelfAttention, which takes scores, or attention"
_REMEDIES = dict.fromkeys(("scores", "return_lse"), _OWN)


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` over the live scores of a mask, with the same arguments, weights and `state_dict`.

    >>> from sparseflash import masks
    >>> theirs = nn.MultiheadAttention(64, 4, batch_first=True)
    >>> x = torch.randn(2, 100, 64)
    >>> ours = MultiheadAttention.from_multihead(theirs)
    >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-5)
    True
    >>> sparse = MultiheadAttention(64, 4, batch_first=True, mask=masks.local(100, window=32))
    >>> _ = sparse.load_state_dict(theirs.state_dict())

    In a model with `torch.nn.MultiheadAttention` layers:

    >>> layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> layer.self_attn = MultiheadAttention.from_multihead(layer.self_attn, masks.local(100, window=32))
    >>> layer(x).shape
    torch.Size([2, 100, 64])

    Args:
        embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, device, dtype: as PyTorch's.
        add_bias_kv, add_zero_attn: must be False; `scores.sink` is a learned key without a value.
        mask: as for `SparseSelfAttention`, or for `SparseCrossAttention` if queries and keys have different lengths.
        backend: as for `attention`.

    PyTorch's fused inference of `nn.TransformerEncoderLayer`, which is dense, does not run for a layer with this
    module. For an `nn.TransformerEncoder` that was made with other layers, set `use_nested_tensor = False`: nested
    tensors are refused here.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        mask: Mask = None,
        backend: Backend | None = None,
    ) -> None:
        if flag(add_bias_kv, "add_bias_kv") or flag(add_zero_attn, "add_zero_attn"):
            _refuse_added_keys()
        bias, batch_first = flag(bias, "bias"), flag(batch_first, "batch_first")
        by_default = {"kdim": kdim, "vdim": vdim}
        given = {name: size for name, size in by_default.items() if size is not None}
        check_at_least_one(embed_dim=embed_dim, num_heads=num_heads, **given)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads; got {embed_dim} and {num_heads}.")
        check_dropout(dropout)
        super().__init__(
            embed_dim, num_heads, dropout, bias, kdim=kdim, vdim=vdim, batch_first=batch_first, device=device,
            dtype=dtype,
        )  # fmt: skip
        # TransformerEncoderLayer reads this before it reads the weights to compute dense attention itself.
        self._qkv_same_embed_dim = False
        self.mask, self.backend = LayerMask(mask), backend

    @classmethod
    def from_multihead(
        cls, module: nn.MultiheadAttention, mask: Mask = None, *, backend: Backend | None = None
    ) -> MultiheadAttention:
        """The same layer with the weights (frozen ones stay frozen), dropout, device and mode of PyTorch's."""
        check_plain(module)
        made = cls(
            module.embed_dim, module.num_heads, module.dropout, module.in_proj_bias is not None, kdim=module.kdim,
            vdim=module.vdim, batch_first=module.batch_first, device=module.out_proj.weight.device,
            dtype=module.out_proj.weight.dtype, mask=mask, backend=backend,
        )  # fmt: skip
        made.load_state_dict(module.state_dict())
        for name, parameter in module.named_parameters():
            made.get_parameter(name).requires_grad_(parameter.requires_grad)
        return made.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | BlockMask | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """`(out, None)`.

        Args:
            query, key, value: `[N, B, E]`, `[B, N, E]` with `batch_first`, or `[N, E]`.
            key_padding_mask: bool `[B, Nk]` (or `[Nk]`), True for padding; or a floating tensor that is added, in which
                -inf is padding. In code compiled by `torch.compile` it breaks the graph.
            need_weights: must be False, which here is the default: the weights are never all in memory.
            attn_mask: a bool tensor, True where a score is DEAD (unlike in `sdpa`); or a floating one that is added; of
                shape `[Nq, Nk]` or `[B * num_heads, Nq, Nk]`. Or a `BlockMask`. A score must be live in the layer's
                mask, too.
            is_causal: query i sees keys 0..i. With an `attn_mask` it promises that the mask is causal, as in PyTorch;
                the library's causal mask replaces it. Unlike PyTorch's, it also works alone.

        Tensors are converted at every call; see `sdpa` for the cost. A query without a live key gives the bias of
        `out_proj`; PyTorch's result there is NaN or depends on its kernel.
        """
        if others:
            refuse(others, "MultiheadAttention", _REMEDIES)
        is_causal = flag(is_causal, "is_causal")
        if flag(need_weights, "need_weights"):
            raise ValueError(
                "need_weights must be False: attention weights are never all in memory; got True. For one pattern of "
                "weights call torch.nn.MultiheadAttention, whose state_dict fits."
            )
        weights = projection_weights(self)
        for name, x, weight in zip(("query", "key", "value"), (query, key, value), weights):
            check_input(x, name, weight, _PADDING)
            if x.ndim != query.ndim or x.ndim not in (2, 3):
                raise ValueError(
                    "query, key and value must all have 3 dimensions, or all 2 without a batch; got "
                    f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}."
                )
        for name, x, size in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if x.shape[-1] != size:
                raise ValueError(f"{name} must have {size} features; got {x.shape[-1]}.")
        has_batch, own = query.ndim == 3, (query, key, value)
        if not has_batch:
            own = tuple(x[None] for x in own)  # type: ignore[assignment]
        elif not self.batch_first:
            own = tuple(x.transpose(0, 1) for x in own)  # type: ignore[assignment]
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in self._projected(weights, *own))
        if isinstance(key_padding_mask, Tensor) and not has_batch and key_padding_mask.ndim == 1:
            key_padding_mask = key_padding_mask[None]
        mask, change = self._live(q, k, key_padding_mask, attn_mask, is_causal)
        dropped = self.dropout if self.training else 0.0
        mixed = attention(q, k, v, mask, dropout_p=dropped, scores=change, backend=self.backend)
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if not has_batch:
            return out.squeeze(0), None
        return (out if self.batch_first else out.transpose(0, 1)), None

    without_others(forward)

    def _projected(self, weights: tuple[Tensor, ...], *given: Tensor) -> list[Tensor]:
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [F.linear(x, weight, bias) for x, weight, bias in zip(given, weights, biases)]

    def _live(
        self, q: Tensor, k: Tensor, padding: Tensor | None, attn_mask: Tensor | BlockMask | None, is_causal: bool
    ) -> tuple[BlockMask | None, Bias | None]:
        q_len, k_len = q.shape[2], k.shape[2]
        masks: list[BlockMask | None] = [self.mask(q_len, k_len, q.device)]
        changes: list[Bias | None] = []
        if is_causal and q_len and k_len:
            masks.append(upper_left(q_len, k_len, _BLOCK, q.device))
        elif isinstance(attn_mask, BlockMask):
            masks.append(attn_mask)
        elif attn_mask is not None:
            attn_mask = _live_of_dead(attn_mask, "attn_mask must be a BlockMask, a bool or a floating point tensor")
            if attn_mask.ndim == 3:
                if attn_mask.shape[0] != q.shape[0] * self.num_heads:
                    raise ValueError(
                        f"attn_mask must have shape [{q_len}, {k_len}] or [{q.shape[0] * self.num_heads}, {q_len}, "
                        f"{k_len}]; got {list(attn_mask.shape)}."
                    )
                attn_mask = attn_mask.unflatten(0, (q.shape[0], self.num_heads))
            live, change = live_and_bias(attn_mask, q_len, k_len, _BLOCK, device=q.device)
            masks.append(live)
            changes.append(change)
        if padding is not None:
            padding = _live_of_dead(padding, "key_padding_mask must be a bool or a floating point tensor")
            if tuple(padding.shape) != (k.shape[0], k_len):
                raise ValueError(
                    f"key_padding_mask must have shape [{k.shape[0]}, {k_len}]; got {list(padding.shape)}."
                )
            live, change = live_and_bias(padding[:, None, None], q_len, k_len, _BLOCK, "key_padding_mask")
            masks.append(live)
            changes.append(change)
        whole: BlockMask | None = None
        for mask in masks:
            whole = mask if whole is None else whole if mask is None else whole & mask
        added = [change.values for change in changes if change is not None]
        return whole, bias(sum(added[1:], start=added[0])) if added else None


def _live_of_dead(mask: object, must: str) -> Tensor:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(f"{must}; got {mask.dtype if isinstance(mask, Tensor) else type(mask).__name__}.")
    return ~mask if mask.dtype == torch.bool else mask


def projection_weights(module: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    """The weights of queries, keys and values, each `[embed_dim, features]`."""
    together: Tensor | None = module.in_proj_weight  # None if widths differ
    if together is not None:
        return together.chunk(3)
    return module.q_proj_weight, module.k_proj_weight, module.v_proj_weight


def copy_projections(module: nn.MultiheadAttention, projections: tuple[nn.Linear, ...], out: nn.Linear) -> None:
    """Copies the weights into linear layers that compute queries, keys and values, in this order."""
    q, k, v = projection_weights(module)
    if k.shape != v.shape or (len(projections) == 1 and q.shape != k.shape):
        raise ValueError(
            f"module must have {'keys' if len(projections) > 1 else 'queries, keys'} and values of one width; got "
            f"embed_dim={module.embed_dim}, kdim={module.kdim} and vdim={module.vdim}. Use nn.MultiheadAttention."
        )
    rows = [layer.out_features for layer in projections]
    weights = (torch.cat([q, k, v]),) if len(projections) == 1 else (q, torch.cat([k, v]))
    for layer, weight in zip(projections, weights, strict=True):
        _copy(layer.weight, weight)
    if module.in_proj_bias is not None:
        for layer, part in zip(projections, module.in_proj_bias.split(rows), strict=True):
            _copy(layer.bias, part)
    _copy(out.weight, module.out_proj.weight)
    if module.out_proj.bias is not None and out.bias is not None:
        _copy(out.bias, module.out_proj.bias)


def _copy(parameter: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(source)
    parameter.requires_grad_(source.requires_grad)


def check_plain(module: nn.Module) -> None:
    """Raises unless this is a `torch.nn.MultiheadAttention` without added keys."""
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(f"module must be a torch.nn.MultiheadAttention; got {type(module).__name__}.")
    if module.bias_k is not None or module.add_zero_attn:
        _refuse_added_keys()


def _refuse_added_keys() -> NoReturn:
    raise ValueError(
        "add_bias_kv and add_zero_attn must be False: a key that all queries see is no part of a mask. For a key "
        "without a value pass scores=scores.sink(...) to attention; else append the key to the context."
    )
