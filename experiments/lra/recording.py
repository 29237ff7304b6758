"""Gradients recorded as a CUDA graph: what a GPU has to do for them, started with one call.

A small model's step is about a thousand kernels, and the host takes longer to start them than the GPU to run them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class Recording(Generic[T]):
    """What `compute` does on a GPU, which is to leave a gradient with every parameter of the model.

    rehearse: runs once before, and changes nothing: all that has to be compiled, and libraries that set themselves up.
    pool: memory that recordings share, by `torch.cuda.graph_pool_handle()`. Each replay overwrites what the others have
        left there, results too. What is recorded first should need the most: the others then fit in.
    gradients: where every recording leaves the gradients, one tensor a parameter; by default each has its own.
    """

    def __init__(
        self,
        model: nn.Module,
        rehearse: Callable[[], object],
        compute: Callable[[], T],
        device: torch.device,
        pool: Any = None,
        gradients: Sequence[Tensor] | None = None,
    ) -> None:
        model.zero_grad(set_to_none=True)
        here, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            rehearse()
        here.wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(device), torch.cuda.graph(self._graph, pool=pool):
                self._result = compute()
                if gradients is not None:
                    move_gradients(model, gradients)
        finally:
            torch.cuda.set_stream(here)  # which a recording that fails may not have left
        self._gradients = [(parameter, parameter.grad) for parameter in model.parameters()]

    def replay(self) -> T:
        """Start it; the result's tensors, and the gradients, are the same ones every time."""
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient  # another recording may have left its own
        return self._result


def refill(place: Tensor, tensor: Tensor) -> None:
    """Copy a tensor into one that a recording reads; the host does not wait for it."""
    pins = place.is_cuda and not tensor.is_cuda
    place.copy_(tensor.pin_memory() if pins else tensor, non_blocking=pins)


def move_gradients(model: nn.Module, places: Sequence[Tensor]) -> None:
    """Let the gradients of a model lie in these tensors, one a parameter."""
    found = [(parameter, place) for parameter, place in zip(model.parameters(), places, strict=True)]
    found = [(parameter, place) for parameter, place in found if parameter.grad is not None]
    torch._foreach_copy_([place for _, place in found], [parameter.grad for parameter, _ in found])
    for parameter, place in found:
        parameter.grad = place
