"""Training steps on packings, as one CUDA graph where possible.

Launched kernel by kernel, a step of 131,072 tokens took the host 55 ms and the GPU 20 (results/tried/pathx.md). The
graph contains the masks, the losses, the gradients and their clipping. The optimiser's step stays outside: it is a few
kernels, and its learning rate changes.
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
    """The training steps of a stage: as a CUDA graph if the settings say so and the device is a GPU.

    Those of a U-Net are never recorded. A graph has room for the most images there can be, ten times as many as there
    are of Path-X. A transformer's work is by tokens, but convolutions would read all of these images.
    """
    objective = objective_of(recipe.layers, config, device)
    if not (config.recorded and config.model == "attention" and device.type == "cuda"):
        return Steps(model, optimizer, objective, device)

    def static(packed: Packed) -> StaticPacking:
        images, blocks = most_images(recipe), most_blocks(recipe)
        return StaticPacking(packed, device, recipe.layers, config.registers, images=images, blocks=blocks)

    return GraphSteps(model, optimizer, objective, device, GraphInputs(static))
