"""Weights, gradients and optimiser divided among the processes that train together, by PyTorch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(model: nn.Module, parts: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Divide a model among all processes. The weights of one of its parts are gathered while that part runs.

    dtype: of the gathered weights; gradients are added up in fp32. Make the optimiser afterwards: it then holds this
    process's share only.
    """
    # Inputs keep their dtype: rotary angles lose a place of the context in bf16.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in parts:
        fully_shard(part, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` has divided a model."""
    return isinstance(model, FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that is divided, which all processes must ask for together; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    gathered: Tensor = tensor.full_tensor()
    return gathered


def divided_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, which all processes have, divided as another of its shape is; itself if that is not divided."""
    if not isinstance(other, DTensor) or tensor.shape != other.shape:
        return tensor
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
