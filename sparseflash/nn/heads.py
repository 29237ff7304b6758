"""The base of the modules: sizes, heads split and merged, and the mask of one call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparseflash.attention import Backend, attention, autocast_dtype
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import check_at_least_one, dense_tensor
from sparseflash.blockmask.lengths import Lengths
from sparseflash.nn.layer_mask import LayerMask, Mask
from sparseflash.scores.change import Change, Scores

REMEDIES = {
    "return_lse": "a layer returns features of tokens. Use attention with its projections",
    "dropout_p": "it is an argument of the layer, dropout=, which layer.eval() turns off",
    "is_causal": "pass mask=masks.causal to the layer",
    "attn_mask": "pass mask=, a BlockMask, such as interop.from_sdpa(attn_mask)",
    "key_padding_mask": "pass lengths=, the tokens of each sequence",
}


class Heads(nn.Module):
    """The sizes of an attention's heads, its mask and its dropout; the base of the modules."""

    def __init__(
        self, embed_dim: int, num_heads: int, mask: Mask, kv_heads: int | None, head_dim: int | None, dropout: float,
        scale: float | None, backend: Backend | None,
    ) -> None:  # fmt: skip
        super().__init__()
        by_default = {"kv_heads": kv_heads, "head_dim": head_dim}
        given = {name: size for name, size in by_default.items() if size is not None}
        check_at_least_one(embed_dim=embed_dim, num_heads=num_heads, **given)
        kv_heads = num_heads if kv_heads is None else kv_heads
        if num_heads % kv_heads:
            raise ValueError(f"num_heads must be a multiple of kv_heads; got {num_heads} and {kv_heads}.")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads unless head_dim is given; got {embed_dim} and {num_heads}."
            )
        check_dropout(dropout)
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.dropout, self.scale, self.backend = dropout, scale, backend
        self.mask = LayerMask(mask)

    def extra_repr(self) -> str:
        groups = "" if self.kv_heads == self.num_heads else f", kv_heads={self.kv_heads}"
        dropped = f", dropout={self.dropout:g}" if self.dropout else ""
        return f"{self.embed_dim}, {self.num_heads} heads of {self.head_dim}{groups}{dropped}, mask={self.mask!r}"

    def split(self, x: Tensor, *heads: int) -> tuple[Tensor, ...]:
        """Heads `[B, H, N, D]` of projected features `[B, N, sum(heads) * D]`, one tensor for each number of heads."""
        return torch.split(x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2), list(heads), dim=1)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, scores: Scores | Change | None = None
    ) -> Tensor:  # fmt: skip
        """Attention `[B, N, H * D]` of heads `[B, H, N, D]`."""
        dropped = self.dropout if self.training else 0.0
        out = attention(q, k, v, mask, scale=self.scale, dropout_p=dropped, scores=scores, backend=self.backend)
        return out.transpose(1, 2).flatten(2)

    def mask_for(self, own: Mask, q_len: int, k_len: int, device: torch.device) -> BlockMask | None:
        return self.mask(q_len, k_len, device) if own is None else LayerMask(own)(q_len, k_len, device)


def check_input(x: Tensor, name: str, weight: Tensor | None, padding: str) -> None:
    """Raises unless x is a dense tensor that can be multiplied by this weight.

    weight: None if it is not known.
    """
    if isinstance(x, Tensor) and x.is_nested:
        raise TypeError(f"{name} must be a plain tensor; got a nested one. Pad it, with {padding}.")
    dense_tensor(x, name)
    if weight is None:
        return
    if x.device != weight.device:
        raise ValueError(
            f"{name} must be on the device of the layer's weights, {weight.device}; it is on {x.device}. Move it, or "
            "the layer: layer.to(device)."
        )
    want = autocast_dtype(weight)
    if autocast_dtype(x) != want:
        cast = "" if want == weight.dtype else " under autocast"
        raise TypeError(
            f"{name} must have the dtype of the layer's weights{cast}, {want}; got {x.dtype}. Cast it, or the layer: "
            "layer.to(dtype)."
        )


def plain_weight(projection: nn.Module) -> Tensor | None:
    """The weight of a projection, used as it is; None unless the projection is PyTorch's own layer.

    Another class, hooks, a replaced `forward` or a weight's own class may cast or move the input or the weight.
    """
    if type(projection) is not nn.Linear or projection._forward_pre_hooks or "forward" in projection.__dict__:
        return None
    weight = projection.weight
    return weight if type(weight) in (Tensor, nn.Parameter) else None


def check_features(x: Tensor, name: str, features: int) -> None:
    """Raises unless x is `[B, N, features]`."""
    if x.ndim != 3 or x.shape[-1] != features:
        raise ValueError(f"{name} must have shape [batch, tokens, {features}]; got {list(x.shape)}.")


def padded(
    mask: BlockMask | None, q_len: int, k_len: int, device: torch.device, **lengths: Lengths | None
) -> BlockMask | None:  # fmt: skip
    """The mask without tokens past the lengths, which are named as for `with_lengths`."""
    if all(each is None for each in lengths.values()) or q_len == 0 or k_len == 0:
        return mask
    if mask is None:
        mask = BlockMask.dense(q_len, k_len).to(device)
    return mask.with_lengths(**lengths)


def check_dropout(dropout: float) -> None:
    """Raises unless this is a probability below 1."""
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be at least 0 and below 1; got {dropout}.")
