from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from experiments.lra.config import Config
from experiments.lra.data.batches import Batch
from experiments.lra.losses import forward
from experiments.training.distributed import SINGLE, Ranks


@dataclass(frozen=True)
class Score:
    loss: float  # mean cross-entropy, nats
    accuracy: float
    examples: int  # or hidden tokens


@torch.inference_mode()
def score(
    model: nn.Module, batches: Iterable[Batch], config: Config, device: torch.device, ranks: Ranks = SINGLE
) -> Score:
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=device)
    right = torch.zeros((), dtype=torch.int64, device=device)
    examples = 0
    for batch in batches:
        batch = batch.to(device)
        logits = forward(model, batch, config)
        loss += F.cross_entropy(logits, batch.labels, reduction="sum")
        right += (logits.argmax(-1) == batch.labels).sum()
        examples += len(batch.labels)
    sums = torch.stack([loss, right.double(), torch.full_like(loss, examples)])
    total_loss, total_right, total = ranks.sum_over_shares(sums).tolist()
    return Score(total_loss / total, total_right / total, int(total))
