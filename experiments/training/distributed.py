"""Training in several processes, one for each GPU, started by torchrun.

    torchrun --nproc-per-node=2 -m experiments.lra train ...                        # two shares of every batch
    torchrun --nproc-per-node=4 -m experiments.lra train ... --context-parallel 2   # and two processes for each share

The first process makes all decisions that depend on the clock or on files, and writes all files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from experiments.training.sharding import is_sharded

T = TypeVar("T")

_TIMEOUT = timedelta(hours=12)


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; by default it trains alone. All must call communicating methods in
    the same order."""

    rank: int = 0
    count: int = 1
    # On the CPU, so that no GPU waits.
    control: dist.ProcessGroup | None = None
    # Processes that share the tokens of sequences; their ranks are consecutive.
    context_parallel: int = 1
    mesh: DeviceMesh | None = None

    @property
    def data_parallel_ranks(self) -> int:
        return self.count // self.context_parallel

    @property
    def data_parallel_rank(self) -> int:
        return self.rank // self.context_parallel

    @property
    def sharers(self) -> str:
        return "processes" if self.context_parallel == 1 else f"groups of {self.context_parallel} processes"

    def check_context_parallel(self, wanted: int) -> None:
        if wanted != self.context_parallel:
            raise ValueError(
                f"context_parallel must be {self.context_parallel}, as in the running processes; got {wanted}"
            )

    def check_batch(self, sequences: int, option: str) -> None:
        if sequences % self.data_parallel_ranks:
            raise ValueError(
                f"the sequences of a batch must be a multiple of the number of {self.sharers}, "
                f"{self.data_parallel_ranks}, which share them; got {sequences}: change {option}"
            )

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def share(self) -> slice:
        return slice(self.data_parallel_rank, None, self.data_parallel_ranks)

    def broadcast(self, value: float) -> float:
        if self.count == 1:
            return value
        received = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(received, 0, self.control)
        return received.item()

    def on_first(self, function: Callable[[], T]) -> T:
        """All processes return the result of the first, or raise its exception."""
        if self.count == 1:
            return function()
        sent: list[Any] = [None, None]
        if self.first:
            try:
                sent[0] = function()
            except Exception as error:
                sent[1] = error
        dist.broadcast_object_list(sent, 0, self.control)
        if sent[1] is not None:
            raise sent[1]
        result: T = sent[0]
        return result

    def first_before_others(self, function: Callable[[], T]) -> T:
        kept: list[T] = []

        def call() -> None:
            kept.append(function())

        self.on_first(call)
        return kept[0] if kept else function()

    def gather(self, value: T) -> list[T]:
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.gather_object(value, found if self.first else None, 0, self.control)
        return found if self.first else []

    def sum_over_shares(self, tensor: Tensor) -> Tensor:
        """With the same bits in all processes. Processes with one share hold equal tensors, which count once."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor / self.context_parallel if self.context_parallel > 1 else tensor

    def data_parallel(self, model: nn.Module) -> nn.Module:
        """Wrapped so that the backward leaves mean gradients; a sharded model does so itself."""
        if self.count == 1 or is_sharded(model):
            return model
        device = next(model.parameters()).device
        places = [device] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=places)
        # An attribute: the argument is deprecated since PyTorch 2.13, and its successor is missing in 2.11.
        wrapped.broadcast_buffers = False
        return wrapped

    def seed_by_rank(self, seed: int) -> None:
        """So that dropout differs between processes.

        Attention over several processes takes its seed from the first process of a sequence.
        """
        if not self.first:
            torch.manual_seed(int(np.random.SeedSequence([seed, self.rank]).generate_state(1)[0]))


SINGLE = Ranks()


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def require_single_process(what: str) -> None:
    if world_size() > 1:
        raise ValueError(f"{what} runs in one process; start it without torchrun")


@contextmanager
def process_group(name: str, context_parallel: int = 1) -> Iterator[Ranks]:
    """context_parallel: processes that share a sequence; raises ValueError unless it divides the number of all."""
    if world_size() % context_parallel:
        raise ValueError(
            f"context_parallel must divide the number of processes, {world_size()}; got {context_parallel}: start "
            f"{context_parallel}, or a multiple, by torchrun --nproc-per-node, or choose another --context-parallel"
        )
    if world_size() == 1:
        yield Ranks()
        return
    device = find_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for Triton
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    control, mesh = dist.new_group(backend="gloo", timeout=_TIMEOUT), None
    if context_parallel > 1:
        sizes = world_size() // context_parallel, context_parallel
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "cp"))
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), control, context_parallel, mesh)
    yield ranks
    dist.destroy_process_group()  # after an error others may wait, and torchrun ends them
    # Threads end with the last reference to the group. A thread that releases a tensor while Python exits aborts the
    # process.
    object.__setattr__(ranks, "control", None)
    object.__setattr__(ranks, "mesh", None)


def find_device(name: str) -> torch.device:
    """ "auto" is a GPU if there is one; each of several processes gets its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"the device must be auto, cpu, cuda or cuda:<number>; got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the device must be auto, cpu, cuda or cuda:<number>; got {name!r}")
    index: int | None = device.index
    if device.type == "cuda" and (index or 0) >= torch.cuda.device_count():
        raise ValueError(f"PyTorch sees {torch.cuda.device_count()} GPUs here; got the device {name!r}")
    if device.type == "cuda" and world_size() > 1:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        if index is not None:
            raise ValueError(f"torchrun gives each process its own GPU: the device must be cuda or auto; got {name!r}")
        if here > torch.cuda.device_count():
            raise ValueError(
                f"each process needs a GPU of its own: torchrun started {here} here, and PyTorch sees "
                f"{torch.cuda.device_count()} GPUs; lower --nproc-per-node"
            )
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device
