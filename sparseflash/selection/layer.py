"""The base of the layers that choose their keys: projections, rotary positions, packed documents and the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparseflash.attention import Backend
from sparseflash.blockmask.arguments import check_at_least_one, checked_device, flag
from sparseflash.nn.heads import REMEDIES, Heads, check_features, check_input, plain_weight
from sparseflash.nn.kv_cache import check_device, length_on_host
from sparseflash.nn.rotary import Rotary, Rotation, rotate
from sparseflash.remedies import refuse, without_others
from sparseflash.selection.attending import How
from sparseflash.selection.cache import SelectionCache, check_cache
from sparseflash.selection.context import Context, check_context
from sparseflash.selection.frame import Frame, packing_of

_CHOOSES = "it chooses its keys itself. Use nn.SparseSelfAttention with a mask"
_REMEDIES = REMEDIES | {
    **dict.fromkeys(("mask", "attn_mask", "key_padding_mask"), _CHOOSES),
    "scores": "it has no score modifications. Use nn.SparseSelfAttention, or the functions of masks and attention",
    "dropout_p": "it has no dropout. Use nn.SparseSelfAttention, or drop features of its output",
    "lengths": "pack the sequences one behind the other, and pass cu_seqlens, their running sums",
    "positions": "positions are counted from the beginning of each sequence",
    "is_causal": "it is always causal",
}


class SelectionLayer(Heads):
    """Causal self-attention `[B, N, embed_dim] -> [B, N, embed_dim]`, whose keys `mix` chooses.

    `qkv` projects to the features of query heads, key heads and value heads; `out` projects back.
    """

    pairs = 1  # keys and values that a token has: one of each for every branch
    unrotated = 0  # the first key heads, which `rotary` does not rotate
    aligned = 1  # packed documents begin at multiples of this number of tokens

    def __init__(
        self, embed_dim: int, num_heads: int, kv_heads: int | None, *, head_dim: int | None, bias: bool,
        qk_norm: bool, rotary: Rotary | None, scale: float | None, backend: Backend | None,
        device: torch.device | str | None, dtype: torch.dtype | None, value_dim: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(embed_dim, num_heads, None, kv_heads, head_dim, 0.0, scale, backend)
        check_at_least_one(**({} if value_dim is None else {"value_dim": value_dim}))
        self.value_dim = self.head_dim if value_dim is None else value_dim
        if not (rotary is None or isinstance(rotary, Rotary)):
            raise TypeError(f"rotary must be Rotary or None; got {type(rotary).__name__}.")
        if rotary is not None and rotary.head_dim != self.rotated_dim:
            raise ValueError(f"rotary must be for heads of {self.rotated_dim} features; it is for {rotary.head_dim}.")
        self.rotary = rotary
        self.make_projections(flag(bias, "bias"), flag(qk_norm, "qk_norm"), device, dtype)

    def make_projections(
        self, bias: bool, qk_norm: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:  # fmt: skip
        pairs = self.pairs * self.kv_heads
        features = (self.num_heads + pairs) * self.head_dim + pairs * self.value_dim
        self.qkv = nn.Linear(self.embed_dim, features, bias=bias, device=device, dtype=dtype)
        self.out = nn.Linear(self.num_heads * self.value_dim, self.embed_dim, bias=bias, device=device, dtype=dtype)
        made = [nn.RMSNorm(self.head_dim, device=device, dtype=dtype) if qk_norm else None for _ in "qk"]
        self.norm_q, self.norm_k = made

    @property
    def rotated_dim(self) -> int:
        return self.head_dim

    @property
    def group(self) -> int:
        return self.num_heads // self.kv_heads

    @property
    def how(self) -> How:
        return How(self.scale, self.backend)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads} heads of {self.head_dim}, kv_heads={self.kv_heads}"

    def mix(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: SelectionCache | None
    ) -> Tensor:  # fmt: skip
        """The attention `[B, Hq, N, Dv]` of queries q to keys and values `[B, pairs * Hkv, Nk, D or Dv]`."""
        raise NotImplementedError

    def begin(self) -> None:
        """Forgets what the last call has left."""

    def kept(self, capacity: int) -> dict[str, tuple[int, int, int]]:
        return {}

    def new_cache(
        self, batch: int, capacity: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> SelectionCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens.

        device, dtype: by default the weights'.

        A step of one token may choose among the whole capacity, of which only the tokens so far are candidates, so that
        a CUDA graph can replay it. So a capacity far beyond the tokens takes time.
        """
        check_at_least_one(batch=batch, capacity=capacity)
        device = checked_device(self.out.weight.device if device is None else device)
        dtype = self.out.weight.dtype if dtype is None else dtype
        heads = self.pairs * self.kv_heads
        sizes = heads, capacity, self.head_dim, self.value_dim
        return SelectionCache(batch, *sizes, self.kept(capacity), device=device, dtype=dtype)

    def forward(
        self, x: Tensor, *, cu_seqlens: Any = None, cache: SelectionCache | None = None,
        context: Context | None = None, **others: Any
    ) -> Tensor:  # fmt: skip
        """Attention within x, or within each of the sequences that are packed in it.

        Args:
            x: `[B, N, embed_dim]`.
            cu_seqlens: running sums of the lengths of sequences that lie one behind the other in x `[1, N, embed_dim]`,
                beginning with 0. No sequence sees or chooses keys of another. They are read on the host: pass them on
                the CPU; in compiled code they break the graph.
            cache: x holds the tokens that follow the tokens in the cache, and is added to it. For inference only.
            context: x holds this rank's tokens of a sequence that lies on several ranks.
        """
        if others:
            refuse(others, type(self).__name__, _REMEDIES)
        check_input(x, "x", plain_weight(self.out), "cu_seqlens")
        check_features(x, "x", self.embed_dim)
        self.begin()
        if context is not None:
            check_context(context, x, cu_seqlens, cache)
        packing = None
        if cu_seqlens is not None:
            if cache is not None:
                raise ValueError("cache must not be given with cu_seqlens; got both.")
            if x.shape[0] != 1:
                raise ValueError(
                    f"x must have shape [1, tokens, {self.embed_dim}] with cu_seqlens; got {list(x.shape)}."
                )
            packing = packing_of(cu_seqlens, self.aligned, x.shape[1], x.device)
            x = packing.spread(x)
        if cache is not None:
            check_cache(cache, self.training)
            check_device(cache, x)
        if x.shape[1] == 0 or (x.shape[0] == 0 and cache is None):
            mixed = of_nothing(self, x, self.out.in_features)
        else:
            if cache is not None and x.shape[1] == 1 and self.how.decodes:
                frame = Frame.after(cache)
            else:
                start = length_on_host(cache) if cache is not None else 0 if context is None else context.start
                bounds = None if packing is None else packing.bounds
                frame = Frame(start, x.shape[1], x.device, packing, context, bounds)
            frame = frame._replace(rotation=self.rotation(frame, frame.new_places))
            mixed = self._mixed(x, frame, cache)
        out: Tensor = self.out(mixed if packing is None else packing.collect(mixed))
        return out

    without_others(forward)

    def rotation(self, frame: Frame, places: Tensor) -> Rotation | None:
        """The rotation of keys at these places; None without rotary positions."""
        return None if self.rotary is None else self.rotary(frame.positions(places))

    def project(self, x: Tensor, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, Hq, N, D]`, and keys and values `[B, pairs * Hkv, N, D or Dv]` of the tokens x."""
        pairs = self.pairs * self.kv_heads
        queries_and_keys, values = self.qkv(x).tensor_split([(self.num_heads + pairs) * self.head_dim], -1)
        q, k = self.split(queries_and_keys, self.num_heads, pairs)
        v = values.unflatten(-1, (pairs, self.value_dim)).transpose(1, 2)
        if self.norm_q is not None and self.norm_k is not None:
            q, k = normalised(q, self.norm_q), normalised(k, self.norm_k)
        unrotated, k = k.tensor_split([self.unrotated], 1)
        q, k = rotated(frame.rotation, q, k)
        return q, torch.cat([unrotated, k], 1) if self.unrotated else k, v

    def merged(self, mixed: Tensor) -> Tensor:
        """What `out` projects, `[B, N, features]`, of the heads `[B, Hq, N, Dv]`."""
        return mixed.transpose(1, 2).flatten(2)

    def _mixed(self, x: Tensor, frame: Frame, cache: SelectionCache | None) -> Tensor:
        q, k, v = self.project(x, frame)
        if cache is None:
            return self.merged(self.mix(x, q, frame.joined(k), frame.joined(v), frame, None))
        length, room = cache.length, slice(frame.k_len)
        try:
            cache.append(k.to(cache.k.dtype), v.to(cache.v.dtype), frame.new_places)
            mixed = self.mix(x, q.to(cache.k.dtype), cache.k[:, :, room], cache.v[:, :, room], frame, cache)
        except BaseException:
            cache.truncate(length)  # otherwise the tokens would be there twice when the call is made again
            raise
        return self.merged(mixed.to(q.dtype))


def of_nothing(layer: nn.Module, x: Tensor, features: int) -> Tensor:
    """The features `[B, N, features]` of no tokens, with gradients of 0 for x and for all parameters."""
    sums = [each.sum().to(x.dtype) for each in (x, *layer.parameters())]
    return x.new_zeros(*x.shape[:-1], features) + torch.stack(sums).sum()


def rotated(rotation: Rotation | None, *parts: Tensor) -> tuple[Tensor, ...]:
    """Heads `[B, H, N, D]` of the same tokens, rotated at once if there is a rotation."""
    if rotation is None:
        return parts
    joined = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    return torch.split(rotate(joined, rotation), [x.shape[1] for x in parts], 1)


def normalised(x: Tensor, norm: nn.RMSNorm | nn.LayerNorm) -> Tensor:
    """The normalised features, in x's dtype; under autocast, which keeps the weights in another one, too."""
    made: Tensor = norm(x.to(norm.weight.dtype)).to(x.dtype)
    return made


def checked_power(value: int, name: str, *, least: int = 16, most: int = 256) -> int:
    """The number of tokens of a block; raises ValueError unless it is a power of two in these bounds."""
    check_at_least_one(**{name: value})
    if value & (value - 1) or not least <= value <= most:
        raise ValueError(f"{name} must be a power of two from {least} to {most} tokens; got {value}.")
    return value
