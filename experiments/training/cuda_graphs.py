"""Training steps as CUDA graphs.

A small model's step is about a thousand kernels, which the host launches more slowly than the GPU runs them. A graph
reads the same addresses, so a batch is first copied into static tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from experiments.training.steps import Batch, Objective, OnDevice, Outcome, Steps, compute_gradients, dry_run

Inner = TypeVar("Inner", contravariant=True)
Outer = TypeVar("Outer", covariant=True)


class StaticInputs(Protocol[Inner, Outer]):
    def fits(self, batch: Inner) -> bool: ...

    def fill(self, batch: Inner) -> None: ...

    def on_device(self) -> Outer: ...


@dataclass(frozen=True)
class GraphInputs(Generic[Batch, OnDevice]):
    """static: makes the tensors of a graph, filled with the batch. key: batches with equal keys share a graph; after
    `most` keys, new ones run without. first: the batch that is captured first; it should need the most memory.
    """

    static: Callable[[Batch], StaticInputs[Batch, OnDevice]]
    key: Callable[[Batch], Hashable] = lambda batch: None
    most: int = 1
    first: Callable[[Batch], Batch] | None = None


@dataclass(frozen=True)
class CapturedStep(Generic[Batch, OnDevice]):
    inputs: StaticInputs[Batch, OnDevice]
    graph: GradientGraph


class GraphSteps(Steps[Batch, OnDevice]):
    """Like Steps, with a graph for each kind of batch. The next step overwrites an outcome's tensors.

    pool: memory shared by the graphs, from `torch.cuda.graph_pool_handle()`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective[Batch, OnDevice],
        device: torch.device,
        inputs: GraphInputs[Batch, OnDevice],
        pool: Any = None,
    ) -> None:
        super().__init__(model, optimizer, objective, device)
        self.inputs, self.pool = inputs, pool
        self.captured: dict[Hashable, CapturedStep[Batch, OnDevice]] = {}
        self.places: list[Tensor] | None = None

    def _prepare(self, batch: Batch) -> None:
        if not self.captured:
            if self.pool is not None:
                self.places = [torch.empty_like(parameter) for parameter in self.model.parameters()]
            if self.inputs.first is not None:
                self._capture(self.inputs.first(batch))
        if self._step_for(batch) is None:
            self._capture(batch)

    def _step_for(self, batch: Batch) -> CapturedStep[Batch, OnDevice] | None:
        found = self.captured.get(self.inputs.key(batch))
        return found if found is not None and found.inputs.fits(batch) else None

    def _capture(self, batch: Batch) -> None:
        key = self.inputs.key(batch)
        self.captured.pop(key, None)  # frees memory
        inputs = self.inputs.static(batch)

        def warm_up() -> None:
            # A batch that adds to gradients follows one of the same shape that does not, so everything is compiled.
            batch = inputs.on_device()
            if not self.objective.adds(batch):
                dry_run(self.model, self.objective.losses, batch, self.device)

        def compute() -> Outcome:
            return compute_gradients(self.model, self.objective, inputs.on_device())

        graph = GradientGraph(self.model, warm_up, compute, self.device, self.pool, self.places)
        self.captured[key] = CapturedStep(inputs, graph)

    def gradients(self, batch: Batch) -> Outcome:
        step = self._step_for(batch)
        if step is None:
            if self.inputs.key(batch) not in self.captured and len(self.captured) >= self.inputs.most:
                return super().gradients(batch)
            self.prepare(batch)
            step = self._step_for(batch)
            assert step is not None
        step.inputs.fill(batch)
        return step.graph.replay()


class GradientGraph:
    """`compute` must set the gradient of every parameter."""

    def __init__(
        self,
        model: nn.Module,
        warm_up: Callable[[], object],
        compute: Callable[[], Outcome],
        device: torch.device,
        pool: Any = None,
        gradients: Sequence[Tensor] | None = None,
    ) -> None:
        model.zero_grad(set_to_none=True)
        current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            warm_up()
        current.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        try:
            if gradients is not None:
                for parameter, place in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = place
            with torch.cuda.device(device), torch.cuda.graph(self._graph, pool=pool):
                self._result = compute()
                if gradients is not None:
                    move_gradients(model, gradients)
        finally:
            torch.cuda.set_stream(current)  # a failed capture may have left another
        self._gradients = [(parameter, parameter.grad) for parameter in model.parameters()]

    def replay(self) -> Outcome:
        """The result's tensors and the gradients are the same objects every time."""
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._result


def copy_into(static: Tensor, tensor: Tensor) -> None:
    pins = static.is_cuda and not tensor.is_cuda
    static.copy_(tensor.pin_memory() if pins else tensor, non_blocking=pins)


def move_gradients(model: nn.Module, places: Sequence[Tensor]) -> None:
    found = [
        (parameter, place, parameter.grad)
        for parameter, place in zip(model.parameters(), places, strict=True)
        if parameter.grad is not None and parameter.grad is not place
    ]
    if not found:
        return
    torch._foreach_copy_([place for _, place, _ in found], [gradient for _, _, gradient in found])
    for parameter, place, _ in found:
        parameter.grad = place
