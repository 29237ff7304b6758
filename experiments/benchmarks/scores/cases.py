"""Score modifications, and their equivalents as FlexAttention's `score_mod`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparseflash import BlockMask, scores

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

# The target for the time relative to plain attention, for the cases that have one.
TARGETS = {
    "alibi": 1.05, "fixed_alibi": 1.05, "softcap": 1.05, "sink": 1.05, "table": 1.10, "key_bias": 1.10, "bias": 1.25,
    "tile_bias": 1.25,
}  # fmt: skip
NAMES = (*TARGETS, "function")


@dataclass(frozen=True)
class Case:
    """One score modification: its learned tensors, and its form for both libraries."""

    name: str
    learned: tuple[Tensor, ...]  # leaves that require gradients
    changes: Callable[[], Any]  # makes the argument of attention(scores=)
    score_mod: ScoreMod | None  # None if FlexAttention cannot express it


def cases(heads: int, mask: BlockMask, dtype: torch.dtype, names: Sequence[str]) -> list[Case]:
    """The named cases for one batch element under a mask, on the mask's device."""
    generator = torch.Generator(mask.device).manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=mask.device, dtype=dtype).requires_grad_()

    made = {
        "alibi": _alibi, "fixed_alibi": _fixed_alibi, "softcap": _softcap, "sink": _sink, "table": _table,
        "key_bias": _key_bias, "bias": _bias, "tile_bias": _tile_bias, "function": _function,
    }  # fmt: skip
    return [made[name](leaf, heads, mask) for name in names]


Leaf = Callable[..., Tensor]


def _alibi(leaf: Leaf, heads: int, mask: BlockMask) -> Case:
    slopes = leaf(heads)
    return Case(
        "alibi", (slopes,), lambda: scores.alibi(slopes), lambda s, b, h, q, k: s - slopes[h] * (q - k).abs()
    )  # fmt: skip


def _fixed_alibi(leaf: Leaf, heads: int, mask: BlockMask) -> Case:
    """As in most models, the slopes are not learned."""
    return replace(_alibi(lambda *shape: leaf(*shape).detach(), heads, mask), name="fixed_alibi", learned=())


def _softcap(leaf: Leaf, heads: int, mask: BlockMask) -> Case:
    return Case("softcap", (), lambda: scores.softcap(50.0), lambda s, b, h, q, k: 50.0 * torch.tanh(s / 50.0))


def _sink(leaf: Leaf, heads: int, mask: BlockMask) -> Case:
    logits = leaf(heads)
    return Case("sink", (logits,), lambda: scores.sink(logits), None)


def _table(leaf: Leaf, heads: int, mask: BlockMask) -> Case:
    table, bucket = leaf(heads, 32), scores.t5_buckets(32, 128)
    made = scores.relative(table, bucket)
    return Case("table", (table,), lambda: made, lambda s, b, h, q, k: s + table[h, bucket(k - q)])


def _key_bias(leaf: Leaf, heads: int, mask: BlockMask) -> Case:
    values = leaf(1, heads, mask.k_len)
    return Case(
        "key_bias", (values,), lambda: scores.key_bias(values), lambda s, b, h, q, k: s + values[0, h, k]
    )  # fmt: skip


def _bias(leaf: Leaf, heads: int, mask: BlockMask) -> Case:
    values = leaf(1, heads, mask.q_len, mask.k_len)
    return Case("bias", (values,), lambda: scores.bias(values), lambda s, b, h, q, k: s + values[0, h, q, k])


def _tile_bias(leaf: Leaf, heads: int, mask: BlockMask) -> Case:
    """FlexAttention reads the same tiles, by the number of each in a table of all."""
    values = leaf(1, heads, len(mask.indices), mask.block_q, mask.block_k)
    number = (mask.to_layout().flatten().cumsum(0) - 1).int().view(mask.blocks)  # right where a tile is live

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        tile = number[q // mask.block_q, k // mask.block_k]
        return s + values[0, h, tile, q % mask.block_q, k % mask.block_k]

    return Case("tile_bias", (values,), lambda: scores.tile_bias(values, mask), score_mod)


def _function(leaf: Leaf, heads: int, mask: BlockMask) -> Case:
    """A gain of each head for nearby keys, which no other modification can express."""
    gains = leaf(heads)

    def near(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, gain: Tensor) -> Tensor:
        return torch.where((q - k).abs() < 256, s * gain[h], s)

    made = scores.function(near, gains)
    return Case("function", (gains,), lambda: made, lambda s, b, h, q, k: near(s, b, h, q, k, gains))


def with_backward(run: Callable[[], Tensor], leaves: Sequence[Tensor], dout: Tensor) -> None:
    """A forward and a backward, with the gradients of all leaves."""
    torch.autograd.grad(run(), leaves, dout)


def calls(run: Callable[[], Tensor], leaves: Sequence[Tensor], dout: Tensor) -> dict[str, Callable[[], object]]:
    """The timed calls of an attention: the forward alone, and with the backward."""

    def forward() -> Tensor:
        with torch.no_grad():
            return run()

    return {"forward": forward, "both": partial(with_backward, run, leaves, dout)}
