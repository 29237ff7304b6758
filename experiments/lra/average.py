"""The exponential moving average of a model's weights, which often tests better than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]  # of every parameter, by its name


class Average:
    """The average of a model's parameters: `average += (1 - decay) * (weights - average)` after every step."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights = copied(model)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model's weights after a step."""
        torch._foreach_lerp_(list(self.weights.values()), list(self.model.parameters()), 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the averaged weights."""
        with exchanged(self.model, self.weights):
            yield

    def load(self, weights: Weights) -> None:
        """Go on from a saved average."""
        for name, average in self.weights.items():
            average.copy_(weights[name])


def copied(model: nn.Module) -> Weights:
    """A copy of a model's parameters."""
    return {name: weights.detach().clone() for name, weights in model.named_parameters()}


@contextmanager
def exchanged(model: nn.Module, weights: Weights) -> Iterator[None]:
    """Inside, the model has these weights, and they are its own; where its own lie in memory stays the same."""
    _exchange(model, weights)
    try:
        yield
    finally:
        _exchange(model, weights)


def _exchange(model: nn.Module, weights: Weights) -> None:
    for name, parameter in model.named_parameters():
        parameter.data, weights[name] = weights[name], parameter.data
