"""The cases that are counted and timed, and the calls of each: forward, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experiments.training.layers.attention import ElementMask, standard_attention
from sparseflash import BlockMask, attention, masks

STANDARD, DENSE, BUTTERFLY = "standard", "dense", "butterfly"


@dataclass(frozen=True)
class Case:
    """One attention, forward and backward, over q, k, v of shape [batch, heads, length, head_dim]."""

    kind: str  # STANDARD: softmax of the whole matrix by PyTorch's operators; DENSE, BUTTERFLY: sparseflash
    factors: int | None  # number of butterfly factors
    batch: int
    heads: int
    length: int  # tokens
    head_dim: int
    block: int  # tokens
    dtype: torch.dtype = torch.bfloat16

    @property
    def way(self) -> str:
        """The implementation, in names of measurements."""
        if self.factors is None:
            return self.kind
        return f"{self.kind}-{self.factors}-factor{'s' * (self.factors != 1)}"

    @property
    def shape(self) -> str:
        """The shape in names of measurements."""
        return f"{self.batch}x{self.length}-heads{self.heads}-d{self.head_dim}"

    def mask(self) -> BlockMask:
        """The live scores, on the CPU."""
        if self.kind == BUTTERFLY:
            return masks.butterfly(self.length, factors=self.factors, block=self.block)
        return BlockMask.dense(self.length, block=self.block)

    def words(self) -> list[str]:
        """The case as arguments of the command that runs one case."""
        shape = (self.batch, self.heads, self.length, self.head_dim, self.block)
        dtype = str(self.dtype).removeprefix("torch.")
        return [self.kind, str(-1 if self.factors is None else self.factors), *map(str, shape), dtype]


def of_words(words: list[str]) -> Case:
    """The inverse of `Case.words`."""
    kind, factors, *shape, dtype = words
    batch, heads, length, head_dim, block = map(int, shape)
    return Case(
        kind, None if int(factors) < 0 else int(factors), batch, heads, length, head_dim, block, getattr(torch, dtype)
    )


def every_density(case: Case) -> list[Case]:
    """The case with standard attention, ours dense, and ours under butterflies of 0, 1, ... factors."""
    most = (-(-case.length // case.block) - 1).bit_length()
    first = [replace(case, kind=kind, factors=None) for kind in (STANDARD, DENSE)]
    return first + [replace(case, kind=BUTTERFLY, factors=factors) for factors in range(most, -1, -1)]


@dataclass(frozen=True)
class Calls:
    """`forward()` returns out; `both()` returns out and the gradients of q, k and v."""

    forward: Callable[[], Tensor]
    both: Callable[[], tuple[Tensor, ...]]


def calls_of(case: Case, device: torch.device, seed: int = 0) -> Calls:
    """The case on random inputs, which are the same for all cases of one shape."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.batch, case.heads, case.length, case.head_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator, device=device).to(case.dtype) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    mask = case.mask().to(device) if case.kind not in (STANDARD, DENSE) else None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.kind == STANDARD:
            return standard_attention(q, k, v, ElementMask(None))
        return attention(q, k, v, mask)

    def forward() -> Tensor:
        with torch.no_grad():
            return run(*inputs)

    def both() -> tuple[Tensor, ...]:
        out = run(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, dout)

    return Calls(forward, both)


def largest_difference(case: Case, device: torch.device) -> float:
    """The difference between standard attention and ours dense, in out and gradients, relative to the largest value."""
    standard, ours = (calls_of(replace(case, kind=kind, factors=None), device).both() for kind in (STANDARD, DENSE))
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(standard, ours, strict=True))
