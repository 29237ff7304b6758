"""Training steps as CUDA graphs where possible, with a graph for each batch shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from experiments.lra.config import Config
from experiments.lra.data.batches import PADDING, Batch, Shape
from experiments.lra.losses import objective_of
from experiments.training.cuda_graphs import GraphInputs, GraphSteps, copy_into
from experiments.training.steps import NO_LABEL, Steps

# At 4,096 tokens in blocks of 128 there are this many; rare shapes are not worth a graph.
MOST_SHAPES = 40


class BatchShape(NamedTuple):
    ids: tuple[int, ...]
    padded: bool


@dataclass(frozen=True)
class StaticBatch:
    batch: Batch
    config: Config

    @classmethod
    def of(cls, batch: Batch, config: Config, device: torch.device) -> StaticBatch:
        return cls(with_most_labels(batch, config).copy_on(device), config)

    def fits(self, batch: Batch) -> bool:
        return True

    def fill(self, batch: Batch) -> None:
        for name, tensor in with_most_labels(batch, self.config).tensors().items():
            copy_into(getattr(self.batch, name), tensor)

    def on_device(self) -> Batch:
        return self.batch


def shape_of(batch: Batch) -> BatchShape:
    return BatchShape(tuple(batch.ids.shape), batch.live_tokens < batch.ids.numel())


def padded_to_longest(batch: Batch, shape: Shape) -> Batch:
    length = shape.row(shape.max_tokens + shape.first)
    missing = length - batch.ids.shape[1]
    if missing <= 0:
        return batch
    return replace(
        batch,
        ids=F.pad(batch.ids, (0, missing), value=PADDING),
        places=None if batch.places is None else F.pad(batch.places, (0, missing)),
        token_labels=None if batch.token_labels is None else F.pad(batch.token_labels, (0, missing), value=NO_LABEL),
    )


def with_most_labels(batch: Batch, config: Config) -> Batch:
    """As many hidden tokens as any batch of its shape can have; added ones have no label."""
    if batch.asked is None:
        return batch
    most = max(1, round(config.hidden * batch.ids.numel()))
    asked, labels = batch.asked.new_zeros(most), batch.labels.new_full((most,), NO_LABEL)
    asked[: len(batch.asked)], labels[: len(batch.labels)] = batch.asked, batch.labels
    return replace(batch, asked=asked, labels=labels)


def steps_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Config,
    device: torch.device,
    data_parallel: nn.Module | None = None,
    pool: Any = None,
) -> Steps[Batch, Batch]:
    """If the settings allow and one process trains alone on a GPU. pool: from `torch.cuda.graph_pool_handle()`."""
    objective = objective_of(config, device)
    alone = data_parallel is None or data_parallel is model
    if not (config.recorded and device.type == "cuda" and alone):
        return Steps(model, optimizer, objective, device, data_parallel)
    inputs: GraphInputs[Batch, Batch] = GraphInputs(
        static=partial(StaticBatch.of, config=config, device=device),
        key=shape_of,
        most=MOST_SHAPES,
        first=partial(padded_to_longest, shape=config.shape),
    )
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    return GraphSteps(model, optimizer, objective, device, inputs, pool)
