from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.lra.config import Config
from experiments.lra.data.batches import Batch
from experiments.lra.token_labels import token_label_loss
from experiments.training.steps import Objective, Outcome, autocast


def objective_of(config: Config, device: torch.device) -> Objective[Batch, Batch]:
    return Objective(lambda batch: batch.to(device), partial(losses, config=config), config.clip)


def losses(model: nn.Module, batch: Batch, config: Config) -> tuple[Tensor, Outcome]:
    logits, token_logits = outputs(model, batch, config)
    smoothing = config.label_smoothing if config.objective == "classify" else 0.0
    loss = F.cross_entropy(logits, batch.labels, label_smoothing=smoothing)
    auxiliary = torch.zeros((), device=logits.device)
    if token_logits is not None and batch.token_labels is not None:
        auxiliary = token_label_loss(token_logits, batch.token_labels)
    total = loss + config.auxiliary * auxiliary if config.auxiliary else loss
    return total, Outcome.of(logits, batch.labels, loss, auxiliary)


def forward(model: nn.Module, batch: Batch, config: Config) -> Tensor:
    return outputs(model, batch, config)[0]


def outputs(model: nn.Module, batch: Batch, config: Config) -> tuple[Tensor, Tensor | None]:
    asked = () if batch.asked is None else (batch.asked,)
    with autocast(batch.ids.device, config.precision):
        found = model(batch.ids, batch.lengths, batch.places, batch.live_tokens < batch.ids.numel(), *asked)
    logits, token_logits = found if isinstance(found, tuple) else (found, None)
    return logits.float(), None if token_logits is None else token_logits.float()
