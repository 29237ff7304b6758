from __future__ import annotations

from typing import Any

import torch
from torch import nn

from experiments.lra.config import Config
from experiments.lra.denoise import Denoiser
from experiments.lra.model import masks
from experiments.lra.model.classifier import Classifier
from experiments.lra.tasks.task import Task
from experiments.lra.token_labels import TokenLabelClassifier
from experiments.training.optimizer import adamw
from sparseflash import BlockMask


def mask_of(config: Config) -> BlockMask:
    return masks.build(config.mask, config.shape.length, block=config.block, window=config.window)


def build_model(config: Config, task: Task, mask: BlockMask) -> Classifier | Denoiser:
    return made_model(config, task, mask).to(mask.device)


def made_model(config: Config, task: Task, mask: BlockMask) -> Classifier | Denoiser:
    torch.manual_seed(config.seed)
    layers = [mask] * config.depth
    sizes: dict[str, Any] = {
        "vocabulary": task.vocabulary,
        "width": config.width,
        "heads": config.heads,
        "head_dim": config.head_dim,
        "mlp": config.mlp,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "positions": config.positions,
        "places": config.shape.places(task.longest),
        "side": task.side,
        "brackets": task.brackets,
        "qk_norm": config.qk_norm,
        "attention": config.attention,
        "encoding": config.encoding,
        "convolution": config.convolution,
    }
    model: Classifier | Denoiser
    if config.objective == "denoise":
        model = Denoiser(layers, first=config.shape.first, **sizes)
    else:
        sizes |= {"classes": task.classes, "towers": task.towers, "pool": config.pool}
        if config.auxiliary:
            model = TokenLabelClassifier(layers, token_classes=task.token_classes, **sizes)
        else:
            model = Classifier(layers, **sizes)
    if config.compiled:
        model.compile_layers()
    return model


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.AdamW:
    return adamw(model, config.lr, config.weight_decay)
