"""`VideoSparseAttention` (VSA): cubes of video tokens attend to the cubes whose means score highest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparseflash import scores
from sparseflash.attention import Backend, attention
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import check_at_least_one, flag
from sparseflash.blockmask.cache import BoundedDict, once
from sparseflash.masks.select_blocks import lists_of
from sparseflash.masks.tiling.columns import Columns
from sparseflash.nn.heads import REMEDIES, Heads, check_features, check_input, plain_weight
from sparseflash.nn.rotary import Rotation, rotate
from sparseflash.remedies import refuse, without_others
from sparseflash.selection.cubes import Cubes, Shape, checked_shape, cubes_of, shapes_of
from sparseflash.selection.layer import normalised, of_nothing

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

    The gates begin as G_c = 0 and G_f = 1, as when a trained model is continued. The choice has no gradient, and there
    is no auxiliary loss.

    Source: Zhang et al., 2025, arXiv 2505.13389, section 2.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, kv_heads: int | None = None, *, cube: Shape = (4, 4, 4), chosen: int = 32,
        head_dim: int | None = None, bias: bool = False, qk_norm: bool = False, scale: float | None = None,
        backend: Backend | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(embed_dim, num_heads, None, kv_heads, head_dim, 0.0, scale, backend)
        self.cube = checked_shape(cube, "cube")
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
        self, x: Tensor, shape: Shape | Sequence[Shape], *, text: int | Sequence[int] = 0,
        rotation: Rotation | None = None, **others: Any
    ) -> Tensor:  # fmt: skip
        """Attention within a video, or within each of several.

        Args:
            x: `[B, N, embed_dim]`.
            shape: frames, rows and columns of the video; or a list of them, one for each of the videos that lie one
                behind the other in x. No video sees or chooses cubes of another.
            text: tokens of text before the video; or a list of them, one for each video, `[text, video, text, ...]`.
                All tokens see their text, and text sees all of its video. It is in no cube: it is no part of a choice,
                and has no coarse attention.
            rotation: of queries and keys, as `nn.Rotary` returns it.
        """
        if others:
            refuse(others, "VideoSparseAttention", _REMEDIES)
        check_input(x, "x", plain_weight(self.qkv), "shape")
        check_features(x, "x", self.embed_dim)
        cubes = self.layout(shape, text, x)
        if x.shape[0] == 0:
            nothing: Tensor = self.out(of_nothing(self, x, self.out.in_features))
            return nothing
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
        q, k, v = (cubes.spread(y, self.volume) for y in (q, k, v))
        q_mean, k_mean, v_mean = (
            y[:, :, cubes.text :].unflatten(2, (-1, self.volume)).sum(3) / cubes.sizes.to(y.dtype)[:, None]
            for y in (q, k, v)
        )
        coarse = attention(q_mean, k_mean, v_mean, cubes.within, scale=self.scale, backend=self.backend)
        coarse = cubes.of_tokens(coarse, self.volume)

        def fine_of(q: Tensor, mask: BlockMask | None) -> Tensor:
            padding = None if cubes.padding is None else scores.key_bias(cubes.padding)
            return attention(q, k, v, mask, scale=self.scale, scores=padding, backend=self.backend)

        fine = fine_of(q[:, :, cubes.text :], self.choice(q_mean, k_mean, cubes))
        if cubes.text:
            fine = torch.cat([fine_of(q[:, :, : cubes.text], cubes.beside), fine], 2)
        gates = self.gate(x).unflatten(2, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [2, B, Hq, N, D]
        out: Tensor = gates[0] * coarse + gates[1] * cubes.collect(fine)
        return out

    @torch.no_grad()
    def choice(self, q_mean: Tensor, k_mean: Tensor, cubes: Cubes) -> BlockMask:
        """The best cubes of each cube, of its own video, and its text, as a mask of tokens in cube order."""
        count = len(cubes.sizes)
        of = Columns(1, 1, 1, 1, count, count, False, 0, 0)
        index = lists_of(q_mean, k_mean, of, min(self.chosen, count), 1.0, cubes.bounds)
        blocks = cubes.text // self.volume
        if blocks:
            text = cubes.blocks.expand(*index.shape[:2], -1, -1)
            index = torch.cat([text, torch.where(index < 0, -1, index + blocks)], 3)
        room = count * self.volume
        return BlockMask.from_block_index(index, block=self.volume, q_len=room, k_len=cubes.text + room)

    def layout(self, shape: Shape | Sequence[Shape], text: int | Sequence[int], x: Tensor) -> Cubes:
        shapes, texts = zip(*shapes_of(shape, text, x.shape[1]), strict=True)
        key = shapes, texts, self.cube, x.device
        return once(_layouts, key, lambda: cubes_of(shapes, texts, self.cube, x.device))


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
