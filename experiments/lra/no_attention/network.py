"""Convolutional networks, for the batches and the training of the arena's transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.lra.config import Config, configure
from experiments.lra.model.classifier import Head
from experiments.lra.tasks import TASKS
from experiments.lra.tasks.task import Task
from experiments.pathfinder.cnn.network import SmallCNN

# What the networks do not have of a preset's transformer, and a length that the command limits.
_OWN = {
    "mask": "dense", "pool": "mean+max", "positions": "learned", "convolution": 0, "encoding": "tokens",
    "background": "keep", "auxiliary": 0.0, "steps": 1_000_000, "checkpoint_every": 1_000_000,
}  # fmt: skip
# About as many parameters as the presets' transformers.
_SEQUENCES = {"width": 256, "depth": 7, "mlp": 256}
_IMAGES = {"image": {"width": 72}}
_PATHS = {"width": 32}

HALVING = 4  # layers that halve a sequence, the first ones
KERNEL = 7


def configured(preset: str, chosen: dict[str, Any]) -> Config:
    """A preset's batches, learning rate and augmentation, for a network."""
    task = chosen["task"]
    sizes = _SEQUENCES if TASKS[task].side is None else _IMAGES.get(task, _PATHS)
    return configure(preset, {**_OWN, **sizes, **chosen})


def network(config: Config, task: Task, device: torch.device) -> nn.Module:
    torch.manual_seed(config.seed)
    return (SequenceCNN(config, task) if task.side is None else ImageCNN(config, task)).to(device)


class SequenceCNN(nn.Module):
    """Residual layers of one convolution each; padding changes nothing."""

    def __init__(self, config: Config, task: Task) -> None:
        super().__init__()
        width = config.width
        self.embedding = nn.Embedding(task.vocabulary, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(config.depth))
        strides = [2 if layer < HALVING else 1 for layer in range(config.depth)]
        self.convolutions = nn.ModuleList(nn.Conv1d(width, width, KERNEL, stride, KERNEL // 2) for stride in strides)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(config.dropout)
        self.head = Head(width, config.mlp, task.classes, task.towers, config.pool)

    def forward(self, ids: Tensor, lengths: Tensor, places: Tensor | None = None, padded: bool = True) -> Tensor:
        live = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None])[..., None]  # [B * T, N, 1]
        x = self.dropout(self.embedding(ids))
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            known = norm(x).masked_fill(~live, 0)
            stride = convolution.stride[0]
            x, live = x[:, ::stride], live[:, ::stride]
            x = x + self.dropout(F.gelu(convolution(known.transpose(1, 2)).transpose(1, 2)))
        logits: Tensor = self.head(self.norm(x), live.sum((1, 2)))
        return logits


class ImageCNN(nn.Module):
    def __init__(self, config: Config, task: Task) -> None:
        super().__init__()
        assert task.side is not None
        self.side = task.side
        sizes = {"blocks": 2, "stages": 3} if task.name in _IMAGES else {}
        self.trunk = SmallCNN(task.side, config.width, classes=task.classes, **sizes)
        self.trunk.to(memory_format=torch.channels_last)

    def forward(self, ids: Tensor, lengths: Tensor, places: Tensor | None = None, padded: bool = True) -> Tensor:
        logits: Tensor = self.trunk((ids - 1).to(torch.uint8).reshape(-1, self.side, self.side))
        return logits
