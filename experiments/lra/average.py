"""The exponential moving average of a model's weights, which often tests better than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """The average of a model's parameters: `average += (1 - decay) * (weights - average)` after every step."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights = {name: weights.detach().clone() for name, weights in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model's weights after a step."""
        torch._foreach_lerp_(list(self.weights.values()), list(self.model.parameters()), 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def load(self, weights: dict[str, Tensor]) -> None:
        """Go on from a saved average."""
        for name, average in self.weights.items():
            average.copy_(weights[name])

    def _swap(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.data, self.weights[name] = self.weights[name], parameter.data
