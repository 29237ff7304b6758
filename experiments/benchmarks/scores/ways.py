"""Causal attention of random inputs by this library and by FlexAttention, plain and with score modifications."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.benchmarks.scores.cases import Case, cases
from sparseflash import attention, interop, masks

OURS, FLEX = "sparseflash", "flex"
PLAIN = "plain"
BACKENDS = {"auto": None, "triton": "triton", "hopper": "hopper"}


class Way(NamedTuple):
    """A forward to time, and the tensors whose gradients its backward computes."""

    run: Callable[[], Tensor]
    wanted: Sequence[Tensor]


class Sizes(NamedTuple):
    """The sizes of one batch element, and its device."""

    length: int
    heads: int
    dim: int
    device: str
    backend: str  # one of BACKENDS, for attention()


class Ways:
    """The implementations that are compared, of inputs that they share."""

    def __init__(self, sizes: Sizes) -> None:
        self.place, self.dim = torch.device(sizes.device), sizes.dim
        self.ours = {"triton": f"{OURS}-portable", "hopper": f"{OURS}-hopper"}.get(sizes.backend, OURS)
        on_gpu = self.place.type == "cuda"
        # A backend of "auto" is the interpreted kernels on a CPU, where attention() would take another.
        self.backend = BACKENDS[sizes.backend] if on_gpu else "triton"
        generator = torch.Generator(self.place).manual_seed(0)
        shape, dtype = (1, sizes.heads, sizes.length, sizes.dim), torch.bfloat16 if on_gpu else torch.float16
        *self.leaves, self.dout = (
            torch.randn(shape, generator=generator, device=self.place, dtype=dtype) for _ in range(4)
        )
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.mask = masks.causal(sizes.length).to(self.place)

    def cases(self, names: Sequence[str]) -> list[Case]:
        q = self.leaves[0]
        return cases(q.shape[1], self.mask, q.dtype, names)

    def plain(self, library: str) -> Way:
        if library == FLEX:
            return Way(self._flex, self.leaves)
        return Way(lambda: attention(*self.leaves, self.mask, backend=self.backend), self.leaves)

    def changed(self, case: Case, library: str) -> Way | None:
        """The way with a score modification; None if the library cannot express the case."""
        wanted = [*self.leaves, *case.learned]
        if library == FLEX:
            return None if case.score_mod is None else Way(lambda: self._flex(score_mod=case.score_mod), wanted)
        return Way(
            lambda: attention(*self.leaves, self.mask, scores=case.changes(), backend=self.backend), wanted
        )  # fmt: skip

    @cached_property
    def _flex(self) -> Callable[..., Any]:
        from torch.nn.attention.flex_attention import flex_attention

        from experiments.benchmarks.speed.peers.flexattention import compiled

        call = compiled(None) if self.place.type == "cuda" else flex_attention
        block_mask = interop.to_flex(self.mask, mask_mod=lambda b, h, q, k: k <= q)
        return lambda **changes: call(*self.leaves, block_mask=block_mask, **changes)
