"""One optimiser step on a batch of sequences, in parts that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from experiments.lm.model.attention import Attention
from experiments.training.optimizer import apply_gradients
from experiments.training.steps import BatchSize, Objective, Outcome, Steps


@dataclass(frozen=True)
class Batch:
    """Sequences [B, N + 1]: N tokens, and the one that follows each. It may lie on the host."""

    tokens: Tensor
    attentions: tuple[Sequence[Attention], ...] = ()  # of each part, if documents do not see each other

    @property
    def size(self) -> BatchSize:
        count = self.tokens.shape[0] * (self.tokens.shape[1] - 1)
        return BatchSize(count, count, count)

    def on_device(self, device: torch.device) -> Tensor:
        """The tokens as int64; the host does not wait for the copy."""
        tokens = self.tokens
        if device.type == "cuda" and not tokens.is_cuda:
            tokens = tokens.pin_memory()
        return tokens.to(device, non_blocking=True).long()


class AccumulatingSteps(Steps[Batch, Tensor]):
    """Training steps whose gradients are the mean over parts of a batch, `part` sequences each.

    The gradients of several processes are exchanged once, after the last part.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        part: int,
        clip: float,
        data_parallel: nn.Module | None = None,
    ) -> None:
        objective: Objective[Batch, Tensor] = Objective(lambda batch: batch.on_device(device), _no_losses, clip)
        super().__init__(model, optimizer, objective, device, data_parallel)
        self.part = part

    def _prepare(self, batch: Batch) -> None:
        """Compile and reserve memory; nothing changes but that the gradients are there, which a step replaces.

        All processes do this together: their gradients are exchanged here, too.
        """
        self._gradients(batch)
        self.optimizer.zero_grad(set_to_none=True)

    def __call__(self, batch: Batch, lr: float) -> Outcome:
        loss = self._gradients(batch)
        if self.objective.clip > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.objective.clip)
        apply_gradients(self.optimizer, lr)
        nothing = torch.zeros_like(loss)
        return Outcome(loss, nothing, nothing)

    def _gradients(self, batch: Batch) -> Tensor:
        """The mean loss of the batch; leaves the gradients with the parameters."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        parts = batch.on_device(self.device).split(self.part)
        total = torch.zeros((), device=self.device)
        for number, tokens in enumerate(parts):
            attentions = batch.attentions[number] if batch.attentions else None
            with _exchange(self.data_parallel, number == len(parts) - 1):
                share = len(tokens) / batch.tokens.shape[0]
                loss = self.data_parallel(tokens[:, :-1], tokens[:, 1:], attentions) * share
                loss.backward()
            total += loss.detach()
        return total


def _no_losses(model: nn.Module, batch: Tensor) -> tuple[Tensor, Outcome]:
    raise NotImplementedError("the parts of a batch have their losses in AccumulatingSteps")


@contextmanager
def _exchange(model: nn.Module, last: bool) -> Iterator[None]:
    """Inside the context, a backward exchanges gradients between processes only if it is the last of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
    elif isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield
