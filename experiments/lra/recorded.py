"""Training steps as CUDA graphs, one for each shape of a batch; see recording.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.lra.batches import NO_LABEL, PADDING, Batch, Shape
from experiments.lra.config import Config
from experiments.lra.recording import Recording, refill
from experiments.lra.step import Outcome, Steps, follow_gradients, gradients, rehearsal

# Attention that takes whole blocks has as many at 4,096 tokens in blocks of 128; one that takes any length has hundreds
# of forms, and the rarer ones are not worth a recording.
MOST_FORMS = 40


class Form(NamedTuple):
    """What a recording is for: batches of one shape. Sequences that fill it need no care for padding."""

    ids: tuple[int, ...]
    padded: bool


@dataclass(frozen=True)
class Recorded:
    """A step up to its gradients, on the tensors of a batch."""

    batch: Batch
    recording: Recording[Outcome]


class RecordedSteps(Steps):
    """Like Steps, on one GPU. An outcome's tensors are overwritten by the next step.

    pool: memory to share with other recordings, see recording.py; by default those of these steps share their own.
    """

    def __init__(self, *arguments: Any, pool: Any = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.recorded: dict[Form, Recorded] = {}
        self.gradients: list[Tensor] = []  # those of all recordings, one a parameter

    def _prepare(self, batch: Batch) -> None:
        """Record a step on batches of this shape; before all others, one on the longest."""
        if not self.recorded:
            self.gradients = [torch.empty_like(parameter) for parameter in self.model.parameters()]
            self._record(as_long_as_any(batch, self.config.shape))
        if form_of(batch) not in self.recorded:
            self._record(batch)

    def _record(self, batch: Batch) -> None:
        room = with_room(batch, self.config).copy_on(self.device)

        def rehearse() -> None:
            rehearsal(self.model, room, self.config)

        def compute() -> Outcome:
            return gradients(self.model, room, self.config)

        recording = Recording(self.model, rehearse, compute, self.device, self.pool, self.gradients)
        self.recorded[form_of(batch)] = Recorded(room, recording)

    def __call__(self, batch: Batch, lr: float) -> Outcome:
        if form_of(batch) not in self.recorded:
            if len(self.recorded) >= MOST_FORMS:
                return super().__call__(batch, lr)
            self.prepare(batch)
        recorded = self.recorded[form_of(batch)]
        copy(with_room(batch, self.config), recorded.batch)
        outcome = recorded.recording.replay()
        follow_gradients(self.optimizer, lr)
        return outcome


def form_of(batch: Batch) -> Form:
    """The recording that a batch needs."""
    return Form(tuple(batch.ids.shape), batch.live_tokens < batch.ids.numel())


def as_long_as_any(batch: Batch, shape: Shape) -> Batch:
    """The batch in rows that hold the task's longest sequence."""
    length = shape.row(shape.max_tokens + shape.first)
    missing = length - batch.ids.shape[1]
    if missing <= 0:
        return batch
    ids = F.pad(batch.ids, (0, missing), value=PADDING)
    return replace(
        batch,
        ids=ids,
        places=None if batch.places is None else F.pad(batch.places, (0, missing)),
        traced=None if batch.traced is None else F.pad(batch.traced, (0, missing), value=NO_LABEL),
    )


def with_room(batch: Batch, config: Config) -> Batch:
    """The batch with as many places that are asked for as any of its shape can have; those too many have no label."""
    if batch.asked is None:
        return batch
    most = max(1, round(config.hidden * batch.ids.numel()))
    asked, labels = batch.asked.new_zeros(most), batch.labels.new_full((most,), NO_LABEL)
    asked[: len(batch.asked)], labels[: len(batch.labels)] = batch.asked, batch.labels
    return replace(batch, asked=asked, labels=labels)


def copy(batch: Batch, there: Batch) -> None:
    """Into the tensors of another batch of its shape; the host does not wait for it."""
    for name in ("ids", "lengths", "places", "labels", "asked", "traced"):
        tensor = getattr(batch, name)
        if tensor is not None:
            refill(getattr(there, name), tensor)


def steps_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Config,
    device: torch.device,
    shared: nn.Module | None = None,
    pool: Any = None,
) -> Steps:
    """The training steps of a run: recorded if the settings say so, the device can, and one process trains alone."""
    alone = shared is None or shared is model
    if config.recorded and device.type == "cuda" and alone:
        return RecordedSteps(model, optimizer, config, device, pool=pool)
    return Steps(model, optimizer, config, device, shared)
