from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.pathx.config import Config
from experiments.pathx.data.device_batch import Batch, on_device
from experiments.pathx.data.masked_pixels import HIDDEN
from experiments.pathx.data.packing import LEVELS, Packed
from experiments.pathx.masks.relations import Relation
from experiments.training.steps import Objective, Outcome, autocast


def objective_of(layers: Sequence[Relation], config: Config, device: torch.device) -> Objective[Packed, Batch]:
    def moved(packed: Packed) -> Batch:
        return on_device(packed, layers, device, config.registers)

    return Objective(moved, partial(losses, config=config), config.clip)


def losses(model: nn.Module, batch: Batch, config: Config) -> tuple[Tensor, Outcome]:
    logits, pixel_logits = forward(model, batch, config)
    loss = F.cross_entropy(logits, batch.labels)
    auxiliary = torch.zeros((), device=logits.device)
    if pixel_logits is not None:
        auxiliary = pixel_loss(pixel_logits, batch, asked_in(batch, hidden=config.hidden > 0))
    total = config.answers * loss + config.auxiliary * auxiliary
    return total, Outcome.of(logits, batch.labels, loss, auxiliary)


def asked_in(batch: Batch, *, hidden: bool) -> Tensor:
    """bool [B, N]: the drawn pixels, or only the hidden ones."""
    if hidden and batch.pixel_labels is not None:
        return (batch.ids == HIDDEN) & (batch.pixel_labels > 0)
    return (batch.ids > 0) & (batch.ids < LEVELS)


def pixel_loss(logits: Tensor, batch: Batch, asked: Tensor) -> Tensor:
    if batch.pixel_labels is None:
        raise ValueError("the batch must have the classes of its pixels for the auxiliary loss; it has none")
    each = F.cross_entropy(logits.flatten(0, 1), batch.pixel_labels.flatten().long(), reduction="none")
    return (each * asked.flatten()).sum() / asked.sum()


def forward(model: nn.Module, batch: Batch, config: Config) -> tuple[Tensor, Tensor | None]:
    with autocast(batch.ids.device, config.precision):
        logits, pixel_logits = model(batch)
    if logits.dtype == torch.bfloat16:
        logits, pixel_logits = logits.float(), None if pixel_logits is None else pixel_logits.float()
    return logits, pixel_logits
