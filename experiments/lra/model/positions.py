"""Positions: by token index, by nesting depth, and by the operator that a token is an argument of.

The index counts the whole sequence, including [CLS] and dropped tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from experiments.training.layers.rotary import Rotations
from experiments.training.layers.transformer import SelfAttention
from sparseflash.nn.rotary import Rotation, line_rates, line_rotation

POSITIONS = ("learned", "sinusoidal", "rotary", "rotary2d", "nested", "tree")
OF_BRACKETS = ("nested", "tree")
_DEEPEST = 31  # for deeper tokens, too
_SHARPNESS = 1.4  # of all heads at first, if some find arguments


def sinusoids(length: int, width: int) -> Tensor:
    """[N, W]: wavelengths 2 pi to 20,000 pi (Vaswani et al., 2017)."""
    if width % 2:
        raise ValueError(f"sinusoidal positions need an even width; got {width}")
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length)[:, None] * rates  # [N, W / 2]
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1) * math.sqrt(2 / width)


class Brackets(NamedTuple):
    opening: tuple[int, ...]
    closing: tuple[int, ...]


class Nesting(nn.Module):
    """A learned vector for each nesting depth.

    Sparse attention sees only some of the earlier brackets.
    """

    change: Tensor

    def __init__(self, brackets: Brackets, vocabulary: int, width: int) -> None:
        super().__init__()
        change = torch.zeros(vocabulary, dtype=torch.int64)
        change[list(brackets.opening)] = 1
        change[list(brackets.closing)] = -1
        self.register_buffer("change", change, persistent=False)
        self.vectors = nn.Embedding(_DEEPEST + 1, width)
        nn.init.normal_(self.vectors.weight, std=width**-0.5)

    def depths(self, ids: Tensor) -> Tensor:
        change = self.change[ids]
        return (change.cumsum(-1) - change.clamp(min=0)).clamp(0, _DEEPEST)

    def forward(self, depths: Tensor) -> Tensor:
        vectors: Tensor = self.vectors(depths)
        return vectors

    def parents(self, ids: Tensor, depths: Tensor) -> Tensor:
        """The index of the innermost open bracket around each of the ids [B, N]; -1 outside of all brackets."""
        levels = torch.arange(_DEEPEST + 1, device=ids.device)[:, None]
        opens = (self.change[ids] > 0)[:, None] & (depths[:, None] == levels)  # [B, levels, N]
        places = torch.arange(ids.shape[1], device=ids.device)
        last = torch.where(opens, places, -1).cummax(-1).values
        found = last.gather(1, (depths - 1).clamp(min=0)[:, None])[:, 0]
        return torch.where(depths > 0, found, -1)


class TreeRotation(nn.Module):
    """The first half of the heads by token index. In the others an operator finds its arguments: queries are rotated
    by their own index, keys by their operator's, so that the two agree for arguments alone."""

    line: Tensor
    equality: Tensor

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.by_index = heads // 2
        self.by_operator = heads - self.by_index
        self.register_buffer("line", line_rates(head_dim), persistent=False)
        self.register_buffer("equality", equality_rates(head_dim), persistent=False)

    def forward(self, places: Tensor, parents: Tensor) -> Rotations:
        """places: [1, N]. parents: [B, N]."""
        near, own, operator = (
            line_rotation(places, self.line),
            line_rotation(places, self.equality),
            line_rotation(parents, self.equality),
        )
        return Rotations(self._by_head(near, own), self._by_head(near, operator))

    @torch.no_grad()
    def begin(self, attention: SelfAttention) -> None:
        """Initial weights that let the heads find arguments before training: equal parts of queries and keys."""
        bias = attention.qkv.bias.view(3, self.by_index + self.by_operator, -1)
        bias[:2, self.by_index :] = 1.0
        for norm in (attention.q_norm, attention.k_norm):
            if isinstance(norm, nn.RMSNorm):
                norm.weight.fill_(_SHARPNESS)

    def _by_head(self, near: Rotation, far: Rotation) -> Rotation:
        near = near.expand(len(far), self.by_index, *near.shape[2:])
        return torch.cat([near, far.expand(-1, self.by_operator, *far.shape[2:])], 1)


def equality_rates(head_dim: int) -> Tensor:
    """Rotation per token in radians, `[D / 2]`: pi times the fractional parts of the square roots of the primes. No
    distance but 0 rotates all pairs of features by almost full turns.

    >>> rates = equality_rates(64)
    >>> distances = torch.arange(1, 2048)[:, None]
    >>> round((rates * distances).cos().mean(-1).max().item(), 2)  # 1 at distance 0
    0.43
    """
    numbers = range(2, 20 * head_dim)
    primes = [number for number in numbers if all(number % below for below in range(2, math.isqrt(number) + 1))]
    return torch.tensor([math.pi * (math.sqrt(prime) % 1) for prime in primes[: head_dim // 2]])
