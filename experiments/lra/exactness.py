"""Attention on a model's tensors beside dense fp64.

The tolerance is twice the error of a plain dense implementation in the tensors' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.lra.config import Config
from experiments.lra.data.batches import Batch
from experiments.lra.losses import forward
from experiments.lra.model.classifier import Classifier
from experiments.training.layers.attention import block_sparse_attention
from experiments.training.layers.transformer import Layer, SelfAttention
from sparseflash import BlockMask
from sparseflash.testing import compare_results, largest_error

NAMES = ("out", "dq", "dk", "dv")
ALLOWED = 2.0


@dataclass(frozen=True)
class Captured:
    q: Tensor  # [B, H, N, D], as are k, v and dout
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: BlockMask


@dataclass(frozen=True)
class Exactness:
    ours: float
    plain: float
    rounding: float  # half a unit in the last place
    within: bool = True  # by the library's comparison

    @property
    def holds(self) -> bool:
        return self.within and self.ours <= ALLOWED * (self.plain + self.rounding)


def check(model: Classifier, batch: Batch, config: Config) -> Exactness:
    """The first layer's attention in a forward and backward pass."""
    call = capture(model, batch, config)
    truth, ours, plain = dense(call, torch.float64), sparse(call), dense(call, call.q.dtype)
    by_name = (dict(zip(NAMES, results)) for results in (ours, truth, plain))
    within = compare_results(*by_name).exact
    ours_error, plain_error = (max(map(error, results, truth)) for results in (ours, plain))
    return Exactness(ours_error, plain_error, torch.finfo(call.q.dtype).eps / 2, within)


def capture(model: Classifier, batch: Batch, config: Config) -> Captured:
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    attention, calls = layer.attention, []

    def mix(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        mixed = SelfAttention.mix(attention, q, k, v, mask)
        calls.append((q, k, v, mixed, mask))
        return mixed

    attention.mix = mix  # type: ignore[method-assign, assignment]
    try:
        loss = F.cross_entropy(forward(model, batch, config), batch.labels)
    finally:
        del attention.mix
    ((q, k, v, mixed, mask),) = calls
    (dout,) = torch.autograd.grad(loss, mixed)
    return Captured(q.detach(), k.detach(), v.detach(), dout, mask)


def sparse(call: Captured) -> list[Tensor]:
    q, k, v = leaves = [x.detach().clone().requires_grad_() for x in (call.q, call.k, call.v)]
    out = block_sparse_attention(q, k, v, call.mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, call.dout)]


def dense(call: Captured, dtype: torch.dtype) -> list[Tensor]:
    q, k, v = leaves = [x.detach().to(dtype).requires_grad_() for x in (call.q, call.k, call.v)]
    live = call.mask.to_dense()  # bool [B, 1, N, N]
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~live, -torch.inf).softmax(-1)
    # The softmax of a padded query is NaN, its output 0 by definition.
    out = weights.masked_fill(~live.any(-1, keepdim=True), 0.0) @ v
    return [out.detach(), *torch.autograd.grad(out, leaves, call.dout.to(dtype))]


def error(x: Tensor, exact: Tensor) -> float:
    return largest_error(x, exact) / (exact.abs().max().item() or 1.0)
