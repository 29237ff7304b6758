"""`VideoSparseAttention` (VSA): cubes of video tokens attend to the cubes whose means score highest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparseflash import scores
from sparseflash.attention import Backend, attention
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import check_at_least_one, flag
from sparseflash.blockmask.cache import BoundedDict, once
from sparseflash.masks.documents import documents
from sparseflash.masks.select_blocks import lists_of
from sparseflash.masks.tiling.columns import Columns
from sparseflash.nn.heads import REMEDIES, Heads, check_features, check_input, plain_weight
from sparseflash.nn.rotary import Rotation, rotate
from sparseflash.remedies import refuse, without_others
from sparseflash.selection.layer import normalised

Shape = tuple[int, int, int]
_layouts = BoundedDict(32)


class VideoSparseAttention(Heads):
    """Video sparse attention of tokens in row-major order: `[B, T * H * W, embed_dim]` to the same; not causal.

    >>> layer = VideoSparseAttention(64, 4, cube=(2, 4, 4), chosen=2)
    >>> layer(torch.randn(2, 4 * 6 * 8, 64), (4, 6, 8)).shape
    torch.Size([2, 192, 64])

    With Q_c, K_c, V_c the means of queries, keys and values over each cube of tokens:

        coarse = softmax(Q_c K_c^T / sqrt(D)) V_c                        the same for all tokens of a cube
        fine   = attention of the tokens of a cube to the tokens of the `chosen` cubes with the highest Q_c K_c^T
        out    = coarse * G_c + fine * G_f,    G = x W + b               gates for each feature of each head

    Args:
        embed_dim, num_heads, kv_heads: features of a token, query heads, and key heads.
        cube: frames, rows and columns of a cube; their product is a power of two from 16 to 256. At the ends of a video
            that it does not divide, cubes are smaller.
        chosen: cubes that a cube reads; each query head chooses for itself.
        qk_norm: normalise the features of queries and keys, with learned weights.
        head_dim, bias, scale, backend: as for `nn.SparseSelfAttention`.

    The gates begin as G_c = 0 and G_f = 1, as when a trained model is continued. There is no auxiliary loss; the choice
    has no gradient.

    Source: Zhang et al., 2025, arXiv 2505.13389, section 2.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, kv_heads: int | None = None, *, cube: Shape = (4, 4, 4), chosen: int = 32,
        head_dim: int | None = None, bias: bool = False, qk_norm: bool = False, scale: float | None = None,
        backend: Backend | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(embed_dim, num_heads, None, kv_heads, head_dim, 0.0, scale, backend)
        self.cube = _checked_shape(cube, "cube")
        self.volume = cube[0] * cube[1] * cube[2]
        if self.volume & (self.volume - 1) or not 16 <= self.volume <= 256:
            raise ValueError(f"cube must have a power of two from 16 to 256 tokens; got {cube}, {self.volume} tokens.")
        check_at_least_one(chosen=chosen)
        self.chosen = chosen
        features = (self.num_heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(embed_dim, features, bias=flag(bias, "bias"), device=device, dtype=dtype)
        self.gate = nn.Linear(embed_dim, 2 * self.num_heads * self.head_dim, device=device, dtype=dtype)
        self.out = nn.Linear(self.num_heads * self.head_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        made = [
            nn.RMSNorm(self.head_dim, device=device, dtype=dtype) if flag(qk_norm, "qk_norm") else None for _ in "qk"
        ]
        self.norm_q, self.norm_k = made
        with torch.no_grad():
            self.gate.weight.zero_()
            self.gate.bias.view(2, -1).copy_(self.gate.bias.new_tensor([[0.0], [1.0]]).expand(2, -1))

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads} heads of {self.head_dim}, cube={self.cube}, chosen={self.chosen}"

    def forward(
        self, x: Tensor, shape: Shape | Sequence[Shape], *, rotation: Rotation | None = None, **others: Any
    ) -> Tensor:  # fmt: skip
        """Attention within a video, or within each of several.

        Args:
            x: `[B, N, embed_dim]`.
            shape: frames, rows and columns of the video; or a list of them, one for each of the videos that lie one
                behind the other in x. No video sees or chooses cubes of another.
            rotation: of queries and keys, `(cosine, sine)` as `nn.rotate` takes them.
        """
        if others:
            refuse(others, "VideoSparseAttention", _REMEDIES)
        check_input(x, "x", plain_weight(self.qkv), "shape")
        check_features(x, "x", self.embed_dim)
        cubes = self._cubes(shape, x)
        q, k, v = self.split(self.qkv(x), self.num_heads, self.kv_heads, self.kv_heads)
        if self.norm_q is not None and self.norm_k is not None:
            q, k = normalised(q, self.norm_q), normalised(k, self.norm_k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        out: Tensor = self.out(self.mix(x, q, k, v, cubes).transpose(1, 2).flatten(2))
        return out

    without_others(forward)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, cubes: Cubes) -> Tensor:
        """The attention `[B, Hq, N, D]` of queries, keys and values `[B, H, N, D]`."""
        q, k, v = (cubes.spread(y) for y in (q, k, v))
        q_mean, k_mean, v_mean = (
            y.unflatten(2, (-1, self.volume)).sum(3) / cubes.sizes.to(y.dtype)[:, None] for y in (q, k, v)
        )
        coarse = attention(q_mean, k_mean, v_mean, cubes.within, scale=self.scale, backend=self.backend)
        mask = self.choice(q_mean, k_mean, cubes)
        padding = None if cubes.padding is None else scores.key_bias(cubes.padding.to(torch.float32))
        fine = attention(q, k, v, mask, scale=self.scale, scores=padding, backend=self.backend)
        gates = self.gate(x).unflatten(2, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [2, B, Hq, N, D]
        coarse = coarse.index_select(2, cubes.places // self.volume)
        return gates[0] * coarse + gates[1] * fine.index_select(2, cubes.places)

    @torch.no_grad()
    def choice(self, q_mean: Tensor, k_mean: Tensor, cubes: Cubes) -> BlockMask:
        """The best cubes of each cube, of its own video, as a mask of tokens in cube order."""
        count = len(cubes.sizes)
        of = Columns(1, 1, 1, 1, count, count, False, 0, 0)
        index = lists_of(q_mean, k_mean, of, min(self.chosen, count), 1.0, cubes.bounds)
        return BlockMask.from_block_index(index, block=self.volume, q_len=count * self.volume)

    def _cubes(self, shape: Shape | Sequence[Shape], x: Tensor) -> Cubes:
        given: list[object] = [shape] if len(shape) and not isinstance(shape[0], Sequence) else list(shape)
        shapes = [_checked_shape(each, "shape") for each in given]
        tokens = sum(t * h * w for t, h, w in shapes)
        if tokens != x.shape[1] or not shapes:
            raise ValueError(f"shape must have as many tokens as x, {x.shape[1]}; got {shapes}, {tokens} tokens.")
        key = tuple(shapes), self.cube, x.device
        return once(_layouts, key, lambda: cubes_of(shapes, self.cube, x.device))


_REMEDIES = REMEDIES | {
    "cache": "its attention is not causal, so no token follows another",
    "cu_seqlens": "pass shape=, a list of the frames, rows and columns of each video",
    **dict.fromkeys(
        ("mask", "attn_mask", "key_padding_mask"),
        "it chooses its keys itself. Use nn.SparseSelfAttention with a mask",
    ),
    "dropout_p": "it has no dropout. Use nn.SparseSelfAttention, or drop features of its output",
    "scores": "it has no score modifications. Use masks.pooled_scores, masks.top_k_blocks and attention",
}


class Cubes(NamedTuple):
    """Videos in cube order, every cube with room for all its tokens.

    places: of the tokens, int64 `[N]`. sizes: tokens of each cube `[cubes]`. bounds: where the video of each cube
    begins and ends, int32 `[2, cubes]`; None for one video. padding: 0 at tokens and -inf at room `[1, 1, room]`; None
    if there is no room. within: each video for itself.
    """

    places: Tensor
    sizes: Tensor
    bounds: Tensor | None
    padding: Tensor | None
    within: BlockMask | None

    def spread(self, x: Tensor) -> Tensor:
        """`[B, H, N, D]` to `[B, H, room, D]`, zeros where there is no token."""
        room = int(self.padding.shape[2]) if self.padding is not None else len(self.places)
        return x.new_zeros(*x.shape[:2], room, x.shape[3]).index_copy(2, self.places, x)


def cubes_of(shapes: Sequence[Shape], cube: Shape, device: torch.device) -> Cubes:
    """The places of videos' tokens in cube order."""
    volume = cube[0] * cube[1] * cube[2]
    places: list[Tensor] = []
    sizes: list[Tensor] = []
    counts: list[int] = []
    for shape in shapes:
        at = [torch.arange(side, device="cpu") for side in shape]
        cube_at = [a // c for a, c in zip(at, cube, strict=True)]
        grid = [-(-side // c) for side, c in zip(shape, cube, strict=True)]
        number = (cube_at[0][:, None, None] * grid[1] + cube_at[1][:, None]) * grid[2] + cube_at[2]
        within = ((at[0] % cube[0])[:, None, None] * cube[1] + (at[1] % cube[1])[:, None]) * cube[2] + at[2] % cube[2]
        count = grid[0] * grid[1] * grid[2]
        places.append((sum(counts) + number).flatten() * volume + within.flatten())
        sizes.append(torch.bincount(number.flatten(), minlength=count))
        counts.append(count)
    place, size = torch.cat(places), torch.cat(sizes)
    padding = None
    if bool((size < volume).any()):
        padding = torch.full((1, 1, len(size) * volume), -torch.inf, device="cpu").index_fill(2, place, 0.0)
    mask = bounds = None
    if len(counts) > 1:
        stops = torch.tensor(counts, device="cpu").cumsum(0)
        bounds = torch.stack([stops.roll(1).index_fill(0, torch.tensor([0]), 0), stops]).to(torch.int32)
        bounds = bounds.repeat_interleave(torch.tensor(counts, device="cpu"), 1).to(device)
        mask = documents(counts).to(device)
    return Cubes(place.to(device), size.to(device), bounds, None if padding is None else padding.to(device), mask)


def _checked_shape(shape: object, name: str) -> Shape:
    if not isinstance(shape, Sequence) or len(shape) != 3:
        raise ValueError(f"{name} must be three numbers, frames, rows and columns; got {shape}.")
    check_at_least_one(**{f"{name}[{axis}]": size for axis, size in enumerate(shape)})
    return int(shape[0]), int(shape[1]), int(shape[2])
