"""One training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from experiments.training.clock import Clock, synchronize
from experiments.training.optimizer import apply_gradients

NO_LABEL = -100  # of padding


class BatchSize(NamedTuple):
    answers: int
    tokens: int  # without padding
    places: int  # with padding


class Sized(Protocol):
    @property
    def size(self) -> BatchSize: ...


Batch = TypeVar("Batch", bound=Sized)
OnDevice = TypeVar("OnDevice")


class Outcome(NamedTuple):
    loss: Tensor  # nats
    auxiliary: Tensor  # of a second loss over pixels, or 0
    right: Tensor

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, loss: Tensor, auxiliary: Tensor) -> Outcome:
        return cls(loss.detach(), auxiliary.detach(), (logits.argmax(-1) == labels).sum())


Losses = Callable[[nn.Module, OnDevice], tuple[Tensor, Outcome]]


@dataclass(frozen=True)
class Objective(Generic[Batch, OnDevice]):
    on_device: Callable[[Batch], OnDevice]
    losses: Losses[OnDevice]
    clip: float  # maximum norm; 0: no clipping
    adds: Callable[[OnDevice], bool] = lambda batch: False


class Steps(Generic[Batch, OnDevice]):
    """model: what a dry run compiles. data_parallel: the trained module, if another."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective[Batch, OnDevice],
        device: torch.device,
        data_parallel: nn.Module | None = None,
    ) -> None:
        self.model, self.optimizer, self.objective, self.device = model, optimizer, objective, device
        self.data_parallel = model if data_parallel is None else data_parallel
        self.preparing = 0.0  # in `prepare`

    def prepare(self, batch: Batch) -> None:
        synchronize(self.device)
        clock = Clock(self.device)
        self._prepare(batch)
        self.preparing += clock.finish()

    def _prepare(self, batch: Batch) -> None:
        dry_run(self.model, self.objective.losses, self.objective.on_device(batch), self.device)

    def __call__(self, batch: Batch, lr: float) -> Outcome:
        outcome = self.gradients(batch)
        apply_gradients(self.optimizer, lr)
        return outcome

    def gradients(self, batch: Batch) -> Outcome:
        return compute_gradients(self.data_parallel, self.objective, self.objective.on_device(batch))


def compute_gradients(model: nn.Module, objective: Objective[Batch, OnDevice], batch: OnDevice) -> Outcome:
    model.train()
    if not objective.adds(batch):
        model.zero_grad(set_to_none=True)
    loss, outcome = objective.losses(model, batch)
    loss.backward()
    if objective.clip > 0:
        nn.utils.clip_grad_norm_(model.parameters(), objective.clip)
    return outcome


def dry_run(model: nn.Module, losses: Losses[OnDevice], batch: OnDevice, device: torch.device) -> None:
    """Weights, gradients and random states stay unchanged; kernels are compiled and memory reserved."""
    model.train()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        loss, _ = losses(model, batch)
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
