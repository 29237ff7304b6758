from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.pathx.config import Config
from experiments.pathx.data.device_batch import on_device
from experiments.pathx.data.packing import Packed
from experiments.pathx.losses import forward
from experiments.pathx.masks.relations import Relation


class Scores(NamedTuple):
    chances: Tensor  # float64 [n], of "connected"
    labels: Tensor  # int64 [n]
    loss: float  # nats

    @property
    def right(self) -> Tensor:
        return (self.chances > 0.5) == (self.labels == 1)

    @property
    def accuracy(self) -> float:
        return float(self.right.double().mean())


def standard_error(accuracy: float, count: int) -> float:
    """On `count` images.

    >>> round(standard_error(0.9, 100), 3), round(standard_error(1.0, 8), 3)
    (0.03, 0.125)

    With no wrong image, the error for one.
    """
    return math.sqrt(max(accuracy * (1 - accuracy), 1 / count) / count)


@torch.inference_mode()
def score(
    model: nn.Module,
    packings: Iterable[Packed],
    layers: tuple[Relation, ...],
    config: Config,
    device: torch.device,
    progress: Callable[[int], None] = lambda images: None,
) -> Scores:
    model.eval()
    logits, labels = [], []
    for packed in packings:
        with torch.inference_mode(False):  # training may use the cached masks
            batch = on_device(packed, layers, device, config.registers)
        logits.append(forward(model, batch, config)[0])
        labels.append(batch.labels)
        progress(sum(map(len, labels)))
    all_logits, all_labels = torch.cat(logits).double().cpu(), torch.cat(labels).cpu()
    return Scores(all_logits.softmax(-1)[:, 1], all_labels, float(F.cross_entropy(all_logits, all_labels)))
