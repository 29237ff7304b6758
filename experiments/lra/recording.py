"""Gradients recorded as a CUDA graph: what a GPU has to do for them, started with one call.

A small model's step is about a thousand kernels, and the host takes longer to start them than the GPU to run them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

T = TypeVar("T")


class Recording(Generic[T]):
    """What `compute` does on a GPU, which is to leave a gradient with every parameter of the model.

    rehearse: does the same for nothing, once, before: libraries must not meet their first call in a recording, and
        kernels are compiled then.
    pool: memory that recordings share, by `torch.cuda.graph_pool_handle()`. Each replay overwrites what the others have
        left there, gradients and results too.
    """

    def __init__(
        self,
        model: nn.Module,
        rehearse: Callable[[], object],
        compute: Callable[[], T],
        device: torch.device,
        pool: Any = None,
    ) -> None:
        model.zero_grad(set_to_none=True)
        here, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            rehearse()
        here.wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(self._graph, pool=pool):
            self._result = compute()
        self._gradients = [(parameter, parameter.grad) for parameter in model.parameters()]

    def replay(self) -> T:
        """Start it; the result's tensors, and the gradients, are the same ones every time."""
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient  # another recording may have left its own
        return self._result
