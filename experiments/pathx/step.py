"""Training steps, and scoring images."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.lra.step import follow_gradients, precision, rehearse, take_gradients
from experiments.pathx.batch import Batch, on_device
from experiments.pathx.config import Config
from experiments.pathx.hiding import HIDDEN
from experiments.pathx.model import PathModel
from experiments.pathx.packing import LEVELS, Packed
from experiments.pathx.relations import Relation


class Outcome(NamedTuple):
    """Of one step, on the device."""

    loss: Tensor  # mean cross-entropy of the answers, nats
    auxiliary: Tensor  # that of the pixels' classes; 0 without that loss
    right: Tensor  # number of right answers


def training_step(
    model: PathModel, optimizer: torch.optim.Optimizer, batch: Batch, config: Config, lr: float
) -> Outcome:
    """Change the weights by one step."""
    outcome = gradients(model, batch, config)
    follow_gradients(optimizer, lr)
    return outcome


def gradients(model: PathModel, batch: Batch, config: Config) -> Outcome:
    """The part of a step that leaves every parameter its gradient."""
    model.train()
    loss, auxiliary, logits = losses(model, batch, config)
    take_gradients(model, total(loss, auxiliary, config), config.clip)
    return Outcome(loss.detach(), auxiliary.detach(), (logits.argmax(-1) == batch.labels).sum())


class Steps:
    """Training steps on packings, whose operations the host hands to the device one by one."""

    def __init__(
        self,
        model: PathModel,
        optimizer: torch.optim.Optimizer,
        layers: tuple[Relation, ...],
        config: Config,
        device: torch.device,
    ) -> None:
        self.model, self.optimizer, self.layers, self.config, self.device = model, optimizer, layers, config, device

    def prepare(self, packed: Packed) -> None:
        """What steps on packings like this one need only once; nothing changes."""
        rehearsal(self.model, self._batch(packed), self.config)

    def __call__(self, packed: Packed, lr: float) -> Outcome:
        """Change the weights by one step."""
        return training_step(self.model, self.optimizer, self._batch(packed), self.config, lr)

    def _batch(self, packed: Packed) -> Batch:
        return on_device(packed, self.layers, self.device, self.config.registers)


def rehearsal(model: PathModel, batch: Batch, config: Config) -> None:
    """All of a step that may have to be compiled; nothing changes."""

    def loss() -> Tensor:
        answers, auxiliary, _ = losses(model, batch, config)
        return total(answers, auxiliary, config)

    rehearse(model, loss, batch.ids.device)


def losses(model: PathModel, batch: Batch, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """The two losses of Outcome, and the logits [I, 2]."""
    logits, counts = forward(model, batch, config)
    loss = F.cross_entropy(logits, batch.labels)
    auxiliary = torch.zeros((), device=logits.device)
    if counts is not None:
        auxiliary = pixel_loss(counts, batch, asked_in(batch, hidden=config.hidden > 0))
    return loss, auxiliary, logits


def total(loss: Tensor, auxiliary: Tensor, config: Config) -> Tensor:
    """What is made small."""
    return config.answers * loss + config.auxiliary * auxiliary


def asked_in(batch: Batch, *, hidden: bool) -> Tensor:
    """The tokens whose class is asked for, bool [B, N]: the drawn pixels, or those of them that are hidden."""
    if hidden and batch.traced is not None:
        return (batch.ids == HIDDEN) & (batch.traced > 0)
    return (batch.ids > 0) & (batch.ids < LEVELS)


def pixel_loss(logits: Tensor, batch: Batch, asked: Tensor) -> Tensor:
    """The mean cross-entropy of the pixels' classes, from logits [B, N, classes], over the tokens asked for [B, N]."""
    if batch.traced is None:
        raise ValueError("the batch must have the classes of its pixels for the auxiliary loss; it has none")
    each = F.cross_entropy(logits.flatten(0, 1), batch.traced.flatten().long(), reduction="none")
    return (each * asked.flatten()).sum() / asked.sum()


def forward(model: PathModel, batch: Batch, config: Config) -> tuple[Tensor, Tensor | None]:
    """Logits [I, 2] and those of the pixels' classes or None, in fp32 or better."""
    with precision(batch.ids.device, config.precision):
        logits, counts = model(batch)
    if logits.dtype == torch.bfloat16:
        logits, counts = logits.float(), None if counts is None else counts.float()
    return logits, counts


class Scores(NamedTuple):
    """Of n images, on the CPU."""

    chances: Tensor  # float64 [n], of "connected"
    labels: Tensor  # int64 [n]
    loss: float  # mean cross-entropy, nats

    @property
    def right(self) -> Tensor:
        """bool [n]"""
        return (self.chances > 0.5) == (self.labels == 1)

    @property
    def accuracy(self) -> float:
        return float(self.right.double().mean())


@torch.inference_mode()
def score(
    model: PathModel, packings: Iterable[Packed], layers: tuple[Relation, ...], config: Config, device: torch.device
) -> Scores:
    """The answers to all images of some packings."""
    model.eval()
    logits, labels = [], []
    for packed in packings:
        with torch.inference_mode(False):  # masks are kept, and training may use them, too
            batch = on_device(packed, layers, device, config.registers)
        logits.append(forward(model, batch, config)[0])
        labels.append(batch.labels)
    all_logits, all_labels = torch.cat(logits).double().cpu(), torch.cat(labels).cpu()
    return Scores(all_logits.softmax(-1)[:, 1], all_labels, float(F.cross_entropy(all_logits, all_labels)))
