"""One training step: the gradients of a loss, and the update of the weights. Each trainer defines its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from experiments.training.clock import Clock, synchronize
from experiments.training.optimizer import apply_gradients

NO_LABEL = -100  # the label of padding; F.cross_entropy ignores it by default


class BatchSize(NamedTuple):
    answers: int  # labels
    tokens: int  # without padding
    places: int  # with padding


class Sized(Protocol):
    """A batch that knows its size on the host."""

    @property
    def size(self) -> BatchSize: ...


Batch = TypeVar("Batch", bound=Sized)
OnDevice = TypeVar("OnDevice")


class Outcome(NamedTuple):
    """The result of one step, on the device."""

    loss: Tensor  # mean cross-entropy of the answers, nats
    auxiliary: Tensor  # the mean of a second loss over pixels, or 0
    right: Tensor  # number of right answers

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, loss: Tensor, auxiliary: Tensor) -> Outcome:
        """logits: [M, classes]; labels: [M]; loss and auxiliary: the two losses."""
        return cls(loss.detach(), auxiliary.detach(), (logits.argmax(-1) == labels).sum())


Losses = Callable[[nn.Module, OnDevice], tuple[Tensor, Outcome]]  # the loss to minimise, and the numbers to log


@dataclass(frozen=True)
class Objective(Generic[Batch, OnDevice]):
    """The loss that a trainer minimises, and how."""

    on_device: Callable[[Batch], OnDevice]
    losses: Losses[OnDevice]
    clip: float  # the maximum norm of all gradients; 0: no clipping
    adds: Callable[[OnDevice], bool] = lambda batch: False  # whether a batch adds to the gradients of the batch before


class Steps(Generic[Batch, OnDevice]):
    """Training steps whose operations the host launches one by one.

    model: the module whose operations a dry run compiles.
    data_parallel: the trained module, if it is not the model itself (see `Ranks.data_parallel`).
    """

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
        self.preparing = 0.0  # seconds spent in `prepare`

    def prepare(self, batch: Batch) -> None:
        """Do the one-time work for batches like this one, such as compiling; no weight changes."""
        synchronize(self.device)
        clock = Clock(self.device)
        self._prepare(batch)
        self.preparing += clock.finish()

    def _prepare(self, batch: Batch) -> None:
        dry_run(self.model, self.objective.losses, self.objective.on_device(batch), self.device)

    def __call__(self, batch: Batch, lr: float) -> Outcome:
        """Update the weights with one step on a batch, which may lie on the host."""
        outcome = self.gradients(batch)
        apply_gradients(self.optimizer, lr)
        return outcome

    def gradients(self, batch: Batch) -> Outcome:
        """The part of a step before the update. Returns the outcome of this process's share of the batch."""
        return compute_gradients(self.data_parallel, self.objective, self.objective.on_device(batch))


def compute_gradients(model: nn.Module, objective: Objective[Batch, OnDevice], batch: OnDevice) -> Outcome:
    """Compute the gradient of every parameter."""
    model.train()
    if not objective.adds(batch):
        model.zero_grad(set_to_none=True)
    loss, outcome = objective.losses(model, batch)
    loss.backward()
    if objective.clip > 0:
        nn.utils.clip_grad_norm_(model.parameters(), objective.clip)
    return outcome


def dry_run(model: nn.Module, losses: Losses[OnDevice], batch: OnDevice, device: torch.device) -> None:
    """Compute a loss and its gradients and discard them: weights, gradients and random states stay unchanged.

    This compiles kernels and reserves memory, so that later step times are representative.
    """
    model.train()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        loss, _ = losses(model, batch)
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """A context in which matrix products run in bfloat16 if the setting `precision` is bf16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
