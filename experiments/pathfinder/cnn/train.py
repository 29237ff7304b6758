from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.pathfinder.cnn.config import Config
from experiments.pathfinder.cnn.images import Batch, in_order
from experiments.pathfinder.cnn.network import SMALLEST, SmallCNN
from experiments.pathfinder.vectors import Vectors
from experiments.training.lr_schedule import factor
from experiments.training.run_log import Record
from experiments.training.steps import autocast

LOG_EVERY = 20  # reading a loss waits for the device


@dataclass
class Training:
    """If only its steps are limited, the weights depend only on config and images."""

    config: Config
    size: int  # pixels
    device: torch.device
    model: SmallCNN = field(init=False)
    step: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)  # since the first batch arrived
    last: Record = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.size <= SMALLEST:
            raise ValueError(f"images must have more than {SMALLEST} pixels along a side; got {self.size}")
        torch.manual_seed(self.config.seed)
        model = SmallCNN(self.size, self.config.width, self.config.blocks)
        self.model = model.to(self.device).to(memory_format=torch.channels_last)

    @property
    def progress(self) -> float:
        by_step = 0.0 if self.config.steps is None else self.step / self.config.steps
        by_time = 0.0 if self.config.minutes is None else self.seconds / (60 * self.config.minutes)
        return max(by_step, by_time)

    def train(self, batches: Iterator[Batch], report: Callable[[Record], None] = lambda record: None) -> None:
        config = self.config
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self.model.train()
        outcomes: list[Tensor] = []
        begun, logged = None, 0.0
        while self.progress < 1:
            images, labels = next(batches)
            if begun is None:
                begun = time.perf_counter()  # starting the drawing processes does not count
            for group in optimizer.param_groups:
                group["lr"] = config.lr * factor("cosine", self.step, config.warmup, self.progress)
            outcomes.append(training_step(self.model, optimizer, images, labels, config.precision))
            self.step += 1
            self.seconds = time.perf_counter() - begun
            if self.step % LOG_EVERY == 0 or self.progress >= 1:
                self._log(outcomes, begun, logged, report)
                outcomes, logged = [], self.seconds

    def _log(self, outcomes: list[Tensor], begun: float, logged: float, report: Callable[[Record], None]) -> None:
        loss, right = torch.stack(outcomes).mean(0).tolist()
        self.seconds = time.perf_counter() - begun
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {self.step}; lower --lr, now {self.config.lr:g}")
        rate = len(outcomes) * self.config.batch / (self.seconds - logged)
        self.last = {"kind": "train", "step": self.step, "loss": loss, "accuracy": right, "images_per_s": rate}
        report(self.last)


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor, precision: str
) -> Tensor:
    logits = logits_of(model, images, precision)
    loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return torch.stack([loss.detach(), (logits.argmax(1) == labels).float().mean()])


def logits_of(model: nn.Module, images: Tensor, precision: str) -> Tensor:
    with autocast(images.device, precision):
        logits: Tensor = model(images)
    return logits.float()


@torch.inference_mode()
def answers(
    model: nn.Module, vectors: Vectors, config: Config, device: torch.device
) -> tuple[NDArray[np.bool_], float]:
    model.eval()
    right, losses = [], []
    for images, labels in in_order(vectors, max(config.batch, 128), device):
        logits = logits_of(model, images, config.precision)
        right.append(logits.argmax(1) == labels)
        losses.append(F.cross_entropy(logits, labels, reduction="none"))
    return torch.cat(right).cpu().numpy(), float(torch.cat(losses).mean())
