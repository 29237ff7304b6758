"""Sharded weights, gradients and optimiser states, by PyTorch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(model: nn.Module, parts: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Shard a model over all processes. The weights of one of its parts are gathered while that part runs.

    dtype: of the gathered weights; gradients are summed in fp32. Make the optimiser afterwards, so that it holds only
        this process's share.
    """
    # Inputs keep their dtype: in bf16, rotary angles would be a position off.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in parts:
        fully_shard(part, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded tensor (all processes must call together); other tensors unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    gathered: Tensor = tensor.full_tensor()
    return gathered


def divided_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A full tensor, sharded like another tensor of its shape; unchanged if the other is not sharded."""
    if not isinstance(other, DTensor) or tensor.shape != other.shape:
        return tensor
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
