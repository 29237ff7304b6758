"""Hypothesis strategies for attention problems: a drawn mask, shapes, dtypes, layouts in memory, and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from sparseflash import BlockMask
from tests.drawn.masks import SEEDS, Recipe, lengths, recipes

LAYOUTS = ("contiguous", "tokens first", "sliced")


@dataclass(frozen=True)
class Problem:
    recipe: Recipe | None  # of the mask; None: attention without a mask
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    dim: int
    v_dim: int
    dtype: torch.dtype
    scale: float | None
    layout: str
    seed: int
    dropout_p: float = 0.0

    @cached_property
    def mask(self) -> BlockMask | None:
        return None if self.recipe is None else self.recipe.mask()

    def tensors(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`(q, k, v, dout, dlse)`: the same values on every device, and up to rounding in every dtype."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = (
            (self.batch, self.heads, self.q_len, self.dim),
            (self.batch, self.kv_heads, self.k_len, self.dim),
            (self.batch, self.kv_heads, self.k_len, self.v_dim),
            (self.batch, self.heads, self.q_len, self.v_dim),
        )
        values = [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]
        dlse = torch.randn(shapes[0][:3], generator=generator, dtype=torch.float64)
        q, k, v, dout = (laid_out(x.to(device), self.layout) for x in values)
        dlse = dlse.to(device, torch.promote_types(self.dtype, torch.float32))
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout, dlse


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "contiguous":
        return x.contiguous()
    if layout == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    # One element into a buffer of NaN, so off any alignment, and reading around it shows.
    buffer = x.new_full((*x.shape[:-1], x.shape[-1] + 3), torch.nan)
    buffer[..., 1:-2] = x
    return buffer[..., 1:-2]


@st.composite
def problems(
    draw: DrawFn,
    most_tokens: int,
    head_dims: Sequence[int],
    value_dims: Sequence[int],
    blocks: Sequence[int],
    dtypes: Sequence[torch.dtype],
    most_heads: int = 4,
    most_batch: int = 2,
    dropouts: Sequence[float] = (0.0,),
) -> Problem:
    batch, heads = draw(st.integers(1, most_batch)), draw(st.integers(1, most_heads))
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    recipe = None
    if draw(st.integers(0, 7)) == 7:
        q_len = draw(lengths(most_tokens, blocks[0]))
        k_len = draw(st.just(q_len) | lengths(most_tokens, blocks[0]))
    else:
        recipe = draw(recipes(most_tokens, blocks, batch, heads, apart=True))
        q_len = recipe.arguments["q_len"]
        k_len = recipe.arguments.get("k_len", q_len)
    return Problem(
        recipe=recipe,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        k_len=k_len,
        dim=draw(st.sampled_from(head_dims)),
        v_dim=draw(st.sampled_from(value_dims)),
        dtype=draw(st.sampled_from(dtypes)),
        scale=draw(st.none() | st.sampled_from([1.0, 0.05, 0.3, -0.2, 0.0])),
        layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(SEEDS),
        dropout_p=draw(st.sampled_from(dropouts)),
    )
