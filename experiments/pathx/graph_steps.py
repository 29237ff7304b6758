"""Training steps on packings, as one CUDA graph where possible.

The optimiser's step stays outside: its learning rate changes.
"""

from __future__ import annotations

import torch
from torch import nn

from experiments.pathx.config import Config
from experiments.pathx.data.batches import Recipe, most_blocks, most_images
from experiments.pathx.data.device_batch import Batch
from experiments.pathx.data.packing import Packed
from experiments.pathx.data.static_packing import StaticPacking
from experiments.pathx.losses import objective_of
from experiments.training.cuda_graphs import GraphInputs, GraphSteps
from experiments.training.steps import Steps


def steps_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, config: Config, device: torch.device
) -> Steps[Packed, Batch]:
    """A CUDA graph if the settings allow and the device is a GPU.

    Not for a U-Net: convolutions would read all images that a graph has room for, ten times a batch's.
    """
    objective = objective_of(recipe.layers, config, device)
    if not (config.recorded and config.model == "attention" and device.type == "cuda"):
        return Steps(model, optimizer, objective, device)

    def static(packed: Packed) -> StaticPacking:
        images, blocks = most_images(recipe), most_blocks(recipe)
        return StaticPacking(packed, device, recipe.layers, config.registers, images=images, blocks=blocks)

    return GraphSteps(model, optimizer, objective, device, GraphInputs(static))
