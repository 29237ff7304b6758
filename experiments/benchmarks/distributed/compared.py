"""Compares ways of attention over ranks: one rank with attention in fp64, and the others with it."""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.benchmarks.distributed.ways import Setting, Way
from sparseflash import testing


def leaves(way: Way) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in way.tensors]


class Compared:
    """Compares ways: the first, on one rank, with attention in fp64, and the others with it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.one: dict[str, Tensor] = {}
        self.allowed: dict[str, float] = {}

    def __call__(self, way: Way) -> float | None:
        """The largest error of the results relative to the allowed error; None without one rank to compare with."""
        found = self.results(way)
        if way.tensors is self.setting.tensors:
            mask = self.setting.mask.to(self.setting.device)
            compared = testing.compare(way.attention, *way.tensors, mask, dout=way.dout, heads=1, blocks=2)
            self.allowed = {name: error.allowed for name, error in compared.errors.items()}
            self.one = found
            return compared.worst
        errors = [
            float((found[name].float() - x.float()).abs().max()) / self.allowed[name] for name, x in self.one.items()
        ]
        return max(errors, default=None)

    def results(self, way: Way) -> dict[str, Tensor]:
        """The whole output and gradients."""
        given = leaves(way)
        out = way.attention(*given)
        found = (out.detach(), *torch.autograd.grad(out, given, way.dout))
        return {name: way.whole(x) for name, x in zip(("out", "dq", "dk", "dv"), found)}
