"""Sharded weights, gradients and optimiser states, by PyTorch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(model: nn.Module, parts: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Over all processes; a part's weights are gathered while it runs.

    dtype: of the gathered weights; gradients are summed in fp32. Make the optimiser afterwards.
    """
    # In bf16, rotary angles would be a position off.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in parts:
        fully_shard(part, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    gathered: Tensor = tensor.full_tensor()
    return gathered


def divided_like(tensor: Tensor, other: Tensor) -> Tensor:
    if not isinstance(other, DTensor) or tensor.shape != other.shape:
        return tensor
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
