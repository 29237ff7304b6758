"""One optimiser step on a batch of sequences, in parts that fit into memory."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from experiments.lm.model.attention import Attention
from experiments.lm.model.transformer import LanguageModel
from experiments.training.cuda_graphs import GraphInputs, GraphSteps, copy_into
from experiments.training.steps import BatchSize, Objective, Outcome, Steps


@dataclass(frozen=True)
class Batch:
    tokens: Tensor
    attentions: tuple[Sequence[Attention], ...] = ()  # for each part

    @property
    def size(self) -> BatchSize:
        return size_of(self.tokens)

    def on_device(self, device: torch.device) -> Tensor:
        tokens = self.tokens
        if device.type == "cuda" and not tokens.is_cuda:
            tokens = tokens.pin_memory()
        return tokens.to(device, non_blocking=True).long()


@dataclass(frozen=True)
class Part:
    tokens: Tensor
    share: float  # b / B
    adds: bool
    attentions: Sequence[Attention] | None = None

    @property
    def size(self) -> BatchSize:
        return size_of(self.tokens)


@dataclass(frozen=True)
class StaticPart:
    part: Part

    @classmethod
    def of(cls, part: Part) -> StaticPart:
        return cls(Part(part.tokens.clone(), part.share, part.adds))

    def fits(self, part: Part) -> bool:
        return True

    def fill(self, part: Part) -> None:
        copy_into(self.part.tokens, part.tokens)

    def on_device(self) -> Part:
        return self.part


def size_of(tokens: Tensor) -> BatchSize:
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    return BatchSize(count, count, count)


class AccumulatingSteps(Steps[Batch, Tensor]):
    """Steps whose gradients are the mean over the parts of a batch.

    Processes exchange gradients once, after the last part.

    recorded: forward and backward of a part are a CUDA graph. One graph writes the gradients of a step's first part,
    another adds gradients of later parts.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        part: int,
        clip: float,
        data_parallel: nn.Module | None = None,
        recorded: bool = False,
    ) -> None:
        objective: Objective[Batch, Tensor] = Objective(lambda batch: batch.on_device(device), _no_losses, clip)
        super().__init__(model, optimizer, objective, device, data_parallel)
        self.part = part
        of_part: Objective[Part, Part] = Objective(lambda part: part, _losses, 0.0, lambda part: part.adds)
        self.parts = self.full_parts = Steps(model, optimizer, of_part, device, data_parallel)
        if recorded:

            def key(part: Part) -> Hashable:
                return part.tokens.shape, part.share, part.adds, model.attentions

            inputs: GraphInputs[Part, Part] = GraphInputs(StaticPart.of, key, most=sys.maxsize)
            pool = torch.cuda.graph_pool_handle()
            self.full_parts = GraphSteps(model, optimizer, of_part, device, inputs, pool)

    def _prepare(self, batch: Batch) -> None:
        """Runs a step that leaves no trace: it changes only gradients, and the next step replaces them."""
        self.gradients(batch)
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self, batch: Batch) -> Outcome:
        # After a validation FSDP may have left gathered weights there.
        self.optimizer.zero_grad(set_to_none=True)
        parts = self.objective.on_device(batch).split(self.part)
        total = torch.zeros((), device=self.device)
        for number, tokens in enumerate(parts):
            attentions = batch.attentions[number] if batch.attentions else None
            part = Part(tokens, len(tokens) / batch.tokens.shape[0], number > 0, attentions)
            steps = self.full_parts if len(tokens) == len(parts[0]) else self.parts
            with _exchange(self.data_parallel, number == len(parts) - 1):
                total += steps.gradients(part).loss
        if self.objective.clip > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.objective.clip)
        nothing = torch.zeros_like(total)
        return Outcome(total, nothing, nothing)


def check_recordable(device: torch.device, processes: int = 1) -> None:
    if device.type != "cuda" or processes > 1:
        raise ValueError(
            f"--recorded must have one process on a GPU, whose steps become CUDA graphs; got {processes} on "
            f"{device.type}: leave it out; a run that began with it goes on with --no-recorded"
        )


def _losses(model: nn.Module, part: Part) -> tuple[Tensor, Outcome]:
    loss = model(part.tokens[:, :-1], part.tokens[:, 1:], part.attentions) * part.share
    nothing = torch.zeros_like(loss)
    return loss, Outcome(loss.detach(), nothing, nothing)


def _no_losses(model: nn.Module, batch: Tensor) -> tuple[Tensor, Outcome]:
    raise NotImplementedError("the parts of a batch have their losses in AccumulatingSteps")


@contextmanager
def _exchange(model: nn.Module, last: bool) -> Iterator[None]:
    """Inside, a backward exchanges gradients only if it is the last of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
    elif isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield
