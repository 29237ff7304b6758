from __future__ import annotations

import torch
from torch import nn


def adamw(
    model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.98)
) -> torch.optim.AdamW:
    """Weight decay on the weights of linear layers and of convolutions only."""
    weighted = (nn.Linear, nn.Conv1d, nn.Conv2d)
    matrices = [module.weight for module in model.modules() if isinstance(module, weighted)]
    chosen = set(matrices)
    others = [parameter for parameter in model.parameters() if parameter not in chosen]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=matrices[0].is_cuda)


def apply_gradients(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
