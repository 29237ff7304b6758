"""Checkpoints: weights, optimiser state and random states, in safetensors files of bounded size.

    <run>/checkpoint-00000500/
        part-01-of-03.safetensors ...   tensors named model.*, average.*, optimizer.<parameter>.*, random.*, and
                                        random.<rank>.* of other processes that train with the first one
        state.json                      step, seconds of training, the format, and what else the kind of run needs

A checkpoint is written under another name and renamed when it is whole, so one that exists is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experiments.lra.average import Average

FORMAT = 1
# Below the 16 MiB that some stores allow a file. A tensor that is larger still has a file of its own.
PART_BYTES = 15 * 2**20


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int  # steps done
    seconds: float  # of training, over all its sessions
    details: dict[str, Any] = field(default_factory=dict)  # plain values that a kind of run needs besides to go on


RandomState = dict[str, Tensor]  # of one process: cpu, and cuda if it trains there


def save(
    run: Path,
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None = None,
    random: list[RandomState] | None = None,
) -> Path:
    """Write a checkpoint into the run's folder, then remove older ones. One of the same step is already the same.

    random: of all processes; None: this one's alone.
    """
    target = run / f"checkpoint-{progress.step:08}"
    if target.exists():
        return target
    for left_by_a_kill in run.glob(".checkpoint-*"):
        shutil.rmtree(left_by_a_kill)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in collect(model, optimizer, average, random)}
    unfinished = Path(tempfile.mkdtemp(prefix=".checkpoint-", dir=run))
    try:
        parts = list(split(tensors, PART_BYTES))
        for number, part in enumerate(parts, start=1):
            save_file(part, unfinished / f"part-{number:02}-of-{len(parts):02}.safetensors")
        state = {"format": FORMAT, **asdict(progress)}
        (unfinished / "state.json").write_text(json.dumps(state, indent=2) + "\n")
        unfinished.chmod(0o755)  # mkdtemp makes it private
        os.replace(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for older in checkpoints(run)[:-1]:
        shutil.rmtree(older)
    return target


def load(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None = None,
    *,
    rank: int = 0,
) -> Progress:
    """Put a checkpoint's state into a model and its optimiser, and set the random states of this process.

    Of a process that the run did not have before they are new, and others than those with which it would have begun.
    """
    state = json.loads((checkpoint / "state.json").read_text())
    if state.pop("format") != FORMAT:
        raise ValueError(f"{checkpoint} must have the checkpoint format {FORMAT}; written by another version")
    tensors: dict[str, Tensor] = {}
    for part in sorted(checkpoint.glob("part-*.safetensors")):
        tensors |= load_file(part)
    model.load_state_dict(under("model", tensors))
    if average is not None:
        average.load(under("average", tensors))
    names = parameter_names(model, optimizer)
    optimizer_state = {index: under(f"optimizer.{name}", tensors) for index, name in names.items()}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": optimizer_state, "param_groups": groups})
    random = under(f"random.{rank}" if rank else "random", tensors)
    device = next(model.parameters()).device
    if "cpu" in random:
        torch.set_rng_state(random["cpu"])
    else:
        torch.manual_seed(torch.initial_seed() + state["step"])
    if "cuda" in random and device.type == "cuda":
        torch.cuda.set_rng_state(random["cuda"], device)
    return Progress(**state)


def random_state(device: torch.device) -> RandomState:
    """The states of this process's generators; each GPU has its own."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(run.glob("checkpoint-*"))


def remove(run: Path) -> None:
    """Delete all checkpoints of a run."""
    for checkpoint in checkpoints(run):
        shutil.rmtree(checkpoint)


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    random: list[RandomState] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint with their names, in a fixed order."""
    for name, tensor in model.state_dict().items():
        yield f"model.{name}", tensor
    if average is not None:
        for name, tensor in average.weights.items():
            yield f"average.{name}", tensor
    names = parameter_names(model, optimizer)
    for index, values in optimizer.state_dict()["state"].items():
        for key, tensor in values.items():
            yield f"optimizer.{names[index]}.{key}", tensor
    for rank, state in enumerate(random or [random_state(next(model.parameters()).device)]):
        for key, tensor in state.items():
            yield f"random.{rank}.{key}" if rank else f"random.{key}", tensor


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """The optimiser's number of each parameter -> the model's name for it."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: names[parameter] for index, parameter in enumerate(parameters)}


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    start = f"{prefix}."
    return {name[len(start) :]: tensor for name, tensor in tensors.items() if name.startswith(start)}


def split(tensors: dict[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive groups of at most `limit` bytes, names and all."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        need = tensor.nbytes + len(name) + 128  # its entry in the file's header takes about 100 bytes
        if part and size + need > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += need
    yield part
