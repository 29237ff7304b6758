"""The whole model's logits and gradients against fp64, before implementations are timed.

The tolerance is twice the error of standard attention in the model's dtype.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.lra.config import Config
from experiments.lra.losses import forward
from experiments.lra.model.build import build_model, mask_of
from experiments.lra.table.shapes import ragged_batch, without_dropout
from experiments.lra.tasks import TASKS

ALLOWED = 2.0

Results = dict[str, Tensor]


class Yardstick:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[str, tuple[Results, float]] = {}

    def error_of(self, config: Config) -> float:
        config = without_dropout(config)
        plain = replace(config, attention="standard")
        if config.mask not in self._known:
            truth = results(plain, self.device, torch.float64)
            self._known[config.mask] = truth, error(results(plain, self.device), truth)
        truth, allowed = self._known[config.mask]
        rounding = torch.finfo(torch.bfloat16 if config.precision == "bf16" else torch.float32).eps / 2
        return error(results(config, self.device), truth) / (ALLOWED * (allowed + rounding))


def results(config: Config, device: torch.device, dtype: torch.dtype | None = None) -> Results:
    model = build_model(config, TASKS[config.task], mask_of(config).to(device))
    batch = ragged_batch(config).to(device)
    if dtype is None:
        logits = forward(model, batch, config)
    else:
        logits = model.to(dtype)(batch.ids, batch.lengths, batch.places)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(F.cross_entropy(logits, batch.labels), parameters)
    return {"logits": logits.detach(), **dict(zip(names, gradients, strict=True))}


def error(found: Results, truth: Results) -> float:
    """The root mean square over all tensors: a single one may be exact by chance."""
    tiny = torch.finfo(torch.float64).tiny
    squares = [
        ((found[name].double() - exact).norm() / exact.double().norm().clamp(min=tiny)) ** 2
        for name, exact in truth.items()
    ]
    return torch.stack(squares).mean().sqrt().item()
