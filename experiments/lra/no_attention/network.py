from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.lra.data.batches import Batch, Shape, blocks_of_rows, evaluation_batches, training_batches
from experiments.lra.data.examples import Examples
from experiments.lra.data.order import Order
from experiments.lra.no_attention.linear import Answered
from experiments.lra.tasks.task import Data, Task
from experiments.pathfinder.cnn.network import SmallCNN
from experiments.training.lr_schedule import factor

_BATCH, _LR, _WARMUP, _VALIDATION = 64, 2e-3, 100, 5_000


class SequenceCNN(nn.Module):
    """Embedding, convolutions of seven tokens that halve the sequence, and the largest and the mean feature."""

    def __init__(self, task: Task, width: int = 64, stages: int = 4) -> None:
        super().__init__()
        self.towers = task.towers
        self.embedding = nn.Embedding(task.vocabulary, width, padding_idx=0)
        self.stages = nn.ModuleList(nn.Conv1d(width, width, 7, 2, 3) for _ in range(stages))
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for _ in range(stages))
        self.head = nn.Sequential(
            nn.Linear(2 * width * (1 if task.towers == 1 else 4), width), nn.GELU(), nn.Linear(width, task.classes)
        )

    def forward(self, batch: Batch) -> Tensor:
        x = self.embedding(batch.ids).transpose(1, 2)
        for convolution, norm in zip(self.stages, self.norms, strict=True):
            x = F.gelu(norm(convolution(x)))
        pooled = torch.cat([x.amax(2), x.mean(2)], 1)
        if self.towers == 2:
            first, second = pooled[0::2], pooled[1::2]
            pooled = torch.cat([first, second, first * second, first - second], 1)
        logits: Tensor = self.head(pooled)
        return logits


class ImageCNN(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        assert task.side is not None
        self.side = task.side
        self.trunk = SmallCNN(task.side, 32, classes=task.classes)

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.trunk((batch.ids - 1).to(torch.uint8).reshape(-1, self.side, self.side))
        return logits


@dataclass(frozen=True)
class Length:
    steps: int | None = None
    minutes: float | None = None

    def progress(self, step: int, seconds: float) -> float:
        by_step = 0.0 if self.steps is None else step / self.steps
        return max(by_step, 0.0 if self.minutes is None else seconds / (60 * self.minutes))


def trained(data: Data, length: Length, seed: int, device: torch.device) -> Answered:
    if length.steps is None and length.minutes is None:
        raise ValueError("a network needs an end: give --minutes or --steps")
    torch.manual_seed(seed)
    task = data.task
    model = (ImageCNN(task) if task.side is not None else SequenceCNN(task)).to(device)
    block = task.side or 128
    shape = Shape(block, task.longest, cls=None)
    order = Order(len(data.train), _BATCH, seed, blocks_of_rows(data.train, shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.01)
    model.train()
    began, step = time.perf_counter(), 0
    for batch in training_batches(data.train, shape, order, 0):
        progress = length.progress(step, time.perf_counter() - began)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = _LR * factor("cosine", step, _WARMUP, progress)
        batch = batch.to(device)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(batch), batch.labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
    model.eval()
    validation, accuracy = (
        right(model, each, shape, most, device) for each, most in ((data.val, _VALIDATION), (data.test, None))
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Answered(accuracy, validation, step * _BATCH, parameters)


@torch.inference_mode()
def right(model: nn.Module, examples: Examples, shape: Shape, most: int | None, device: torch.device) -> float:
    found = []
    for batch in evaluation_batches(examples, shape, 4 * _BATCH, most or len(examples)):
        batch = batch.to(device)
        found.append((model(batch).argmax(1) == batch.labels).cpu().numpy())
    return float(np.concatenate(found).mean())
