from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.lra.config import Config
from experiments.lra.data.batches import Batch
from experiments.lra.tasks import TASKS
from experiments.lra.token_labels import token_label_loss
from experiments.training.steps import Objective, Outcome, autocast


def objective_of(config: Config, device: torch.device) -> Objective[Batch, Batch]:
    return Objective(lambda batch: batch.to(device), partial(losses, config=config), config.clip)


def losses(model: nn.Module, batch: Batch, config: Config) -> tuple[Tensor, Outcome]:
    """To minimise, and to log."""
    side = TASKS[config.task].side
    shares = None
    if config.cutmix and side is not None:
        ids, shares = pasted(batch.ids, side, config.cutmix)
        batch = replace(batch, ids=ids)
    logits, token_logits = outputs(model, batch, config)
    smoothing = config.label_smoothing if config.objective == "classify" else 0.0
    if shares is None:
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=smoothing)
    else:
        own, other = (
            F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
            for labels in (batch.labels, batch.labels.roll(1))
        )
        loss = (own + shares * (other - own)).mean()
    auxiliary = torch.zeros((), device=logits.device)
    if token_logits is not None and batch.token_labels is not None:
        auxiliary = token_label_loss(token_logits, batch.token_labels)
    total = loss + config.auxiliary * auxiliary if config.auxiliary else loss
    return total, Outcome.of(logits, batch.labels, loss, auxiliary)


def pasted(ids: Tensor, side: int, chance: float) -> tuple[Tensor, Tensor]:
    """Images [B, N] with a square of the image before each, and the squares' shares of the pixels, [B].

    Sangdoo Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features" (ICCV
    2019). chance: that an image gets one; its area, before the edges cut it off, is drawn evenly from 0 to 1.
    """
    count, pixels = ids.shape
    area, down, right, drawn = torch.rand(4, count, 1, device=ids.device)
    reach = area.sqrt() / 2 * side
    at = torch.arange(pixels, device=ids.device)
    inside = (at // side + 0.5 - down * side).abs() < reach
    inside &= (at % side + 0.5 - right * side).abs() < reach
    inside &= drawn < chance
    return torch.where(inside, ids.roll(1, 0), ids), inside.float().mean(1)


def forward(model: nn.Module, batch: Batch, config: Config) -> Tensor:
    """In fp32, for each of the batch's labels."""
    return outputs(model, batch, config)[0]


def outputs(model: nn.Module, batch: Batch, config: Config) -> tuple[Tensor, Tensor | None]:
    asked = () if batch.asked is None else (batch.asked,)
    with autocast(batch.ids.device, config.precision):
        found = model(batch.ids, batch.lengths, batch.places, batch.live_tokens < batch.ids.numel(), *asked)
    logits, token_logits = found if isinstance(found, tuple) else (found, None)
    return logits.float(), None if token_logits is None else token_logits.float()
