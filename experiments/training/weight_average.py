"""The exponential moving average of a model's weights, which often tests better."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]


class WeightAverage:
    """`average += (1 - decay) * (weights - average)` after every step.

    warms_up: the decay starts at `(1 + step) / (10 + step)`.
    """

    def __init__(self, model: nn.Module, decay: float, *, warms_up: bool = False) -> None:
        self.model, self.decay, self.warms_up = model, decay, warms_up
        self.weights = copied(model)

    @torch.no_grad()
    def update(self, step: int = 0) -> None:
        decay = min(self.decay, (1 + step) / (10 + step)) if self.warms_up else self.decay
        torch._foreach_lerp_(list(self.weights.values()), list(self.model.parameters()), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with exchanged(self.model, self.weights):
            yield

    def load(self, weights: Weights) -> None:
        for name, average in self.weights.items():
            average.copy_(weights[name])


def copied(model: nn.Module) -> Weights:
    return {name: weights.detach().clone() for name, weights in model.named_parameters()}


@contextmanager
def exchanged(model: nn.Module, weights: Weights) -> Iterator[None]:
    _exchange(model, weights)
    try:
        yield
    finally:
        _exchange(model, weights)


def _exchange(model: nn.Module, weights: Weights) -> None:
    for name, parameter in model.named_parameters():
        parameter.data, weights[name] = weights[name], parameter.data
