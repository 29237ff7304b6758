"""Training steps as one CUDA graph, which the host starts with one call.

Without it a step of 131,072 tokens took the host 55 ms and the GPU 20 (results/pathx/notes.md). Recorded are the masks,
the losses, the gradients and their clipping; the optimiser's step is a few kernels, and has a learning rate of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from experiments.lra.recording import Recording
from experiments.pathx.batch import Batch, batch_of
from experiments.pathx.config import Config
from experiments.pathx.model import PathModel
from experiments.pathx.packing import Packed
from experiments.pathx.room import Room
from experiments.pathx.step import Outcome, Steps, follow_gradients, gradients, rehearsal
from experiments.pathx.stream import Recipe, most_blocks, most_images


class Recorded(NamedTuple):
    """A step up to its gradients, on what is in the room."""

    room: Room
    recording: Recording[Outcome]


class RecordedSteps(Steps):
    """Like Steps, on a GPU, for packings of one number of tokens."""

    def __init__(
        self, model: PathModel, optimizer: torch.optim.Optimizer, recipe: Recipe, config: Config, device: torch.device
    ) -> None:
        super().__init__(model, optimizer, recipe.layers, config, device)
        self.images, self.blocks = most_images(recipe), most_blocks(recipe)
        self.recorded: Recorded | None = None

    def __call__(self, packed: Packed, lr: float) -> Outcome:
        """Change the weights by one step. The outcome's tensors are those of every step."""
        if self.recorded is None or not self.recorded.room.holds(packed):
            self.prepare(packed)
        else:
            self.recorded.room.take(packed)
        outcome = self.recorded.recording.replay()
        follow_gradients(self.optimizer, lr)
        return outcome

    def prepare(self, packed: Packed) -> None:
        """Record a step on packings like this one, which is then in the room; no weight changes."""
        self.recorded = None  # gives back the memory of the one before
        room = Room(packed, self.device, images=self.images, blocks=self.blocks)

        def rehearse() -> None:
            rehearsal(self.model, self._batch_in(room, packed), self.config)

        def compute() -> Outcome:
            return gradients(self.model, self._batch_in(room, packed), self.config)

        self.recorded = Recorded(room, Recording(self.model, rehearse, compute, self.device))

    def _batch_in(self, room: Room, packed: Packed) -> Batch:
        return batch_of(
            room.tensors, self.layers, packed.block, self.config.registers, tokens=packed.tokens, images=packed.images
        )


def steps_of(
    model: PathModel, optimizer: torch.optim.Optimizer, recipe: Recipe, config: Config, device: torch.device
) -> Steps:
    """The training steps of a stage, recorded if the settings say so and the device can."""
    if config.recorded and device.type == "cuda":
        return RecordedSteps(model, optimizer, recipe, config, device)
    return Steps(model, optimizer, recipe.layers, config, device)
