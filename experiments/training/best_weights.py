from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from experiments.training.weight_average import Weights, copied, exchanged


class BestWeights:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights: Weights = {}  # none before the first validation
        self.step, self.accuracy = 0, float("-inf")
        self.offered = 0  # step

    def offer(self, step: int, accuracy: float) -> None:
        self.offered = step
        if accuracy > self.accuracy:
            self.weights, self.step, self.accuracy = copied(self.model), step, accuracy

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with exchanged(self.model, self.weights):
            yield

    @property
    def state(self) -> dict[str, Any] | None:
        return {"step": self.step, "accuracy": self.accuracy, "offered": self.offered} if self.weights else None

    def load(self, state: dict[str, Any] | None, weights: Weights) -> None:
        if state is None:
            return
        self.step, self.accuracy, self.offered = state["step"], state["accuracy"], state["offered"]
        self.weights = copied(self.model)
        for name, best in self.weights.items():
            best.copy_(weights[name])
