"""Training steps as one CUDA graph, which the host starts with one call.

A step is about a thousand kernels, most of them of 10 to 100 microseconds, and the host takes longer to start them than
the GPU to run them: 55 ms and 20 ms a step of 131,072 tokens (results/pathx/notes.md). Recorded are the masks, the
losses, the gradients and their clipping; the optimiser's step is a few kernels, and has a learning rate of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from experiments.pathx.batch import Batch, batch_of
from experiments.pathx.config import Config
from experiments.pathx.model import PathModel
from experiments.pathx.packing import Packed
from experiments.pathx.room import Room
from experiments.pathx.step import Outcome, Steps, follow_gradients, gradients, rehearsal
from experiments.pathx.stream import Recipe, most_blocks, most_images


class Recording(NamedTuple):
    """A step up to its gradients, on what is in the room; every replay overwrites them and the outcome."""

    room: Room
    graph: torch.cuda.CUDAGraph
    outcome: Outcome


class RecordedSteps(Steps):
    """Like Steps, on a GPU, for packings of one number of tokens."""

    def __init__(
        self, model: PathModel, optimizer: torch.optim.Optimizer, recipe: Recipe, config: Config, device: torch.device
    ) -> None:
        super().__init__(model, optimizer, recipe.layers, config, device)
        self.images, self.blocks = most_images(recipe), most_blocks(recipe)
        self.recording: Recording | None = None

    def prepare(self, packed: Packed) -> None:
        """Record a step on packings like this one, which is then in the room; no weight changes."""
        self._record(packed)

    def __call__(self, packed: Packed, lr: float) -> Outcome:
        """Change the weights by one step. The outcome's tensors are those of every step."""
        recording = self.recording
        if recording is None or not recording.room.holds(packed):
            recording = self._record(packed)
        else:
            recording.room.take(packed)
        recording.graph.replay()
        follow_gradients(self.optimizer, lr)
        return recording.outcome

    def _record(self, packed: Packed) -> Recording:
        self.recording = None  # gives back the memory of the one before,
        self.model.zero_grad(set_to_none=True)  # gradients, too
        room = Room(packed, self.device, images=self.images, blocks=self.blocks)
        here, beside = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        beside.wait_stream(here)
        with torch.cuda.stream(beside):  # libraries must not meet their first call in a recording
            rehearsal(self.model, self._batch_in(room, packed), self.config)
        here.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outcome = gradients(self.model, self._batch_in(room, packed), self.config)
        self.recording = Recording(room, graph, outcome)
        return self.recording

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
