"""Checkpoints: weights, optimiser state and random states, in safetensors files of bounded size.

    <run>/checkpoint-00000500/
        part-01-of-03.safetensors ...   tensors named model.*, average.*, best.*, optimizer.<parameter>.*, random.*,
                                        and random.<rank>.* of other processes
        state.json                      step, seconds of training, the format, the number of processes, and values
                                        of the trainer

Written under another name and renamed when complete.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.training.atomic_files import write_json
from experiments.training.best_weights import BestWeights
from experiments.training.reading import read_json, reading
from experiments.training.sharding import divided_like, whole
from experiments.training.tensor_files import PART_BYTES, check_alike, contents, split
from experiments.training.weight_average import WeightAverage

FORMAT = 1


@dataclass(frozen=True)
class Progress:
    step: int
    seconds: float  # over all sessions
    details: dict[str, Any] = field(default_factory=dict)


RandomState = dict[str, Tensor]


def save(
    run: Path,
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None = None,
    random: list[RandomState] | None = None,
    *,
    best: BestWeights | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> Path:
    """random: of all processes; None: only of this one. tensors: the result of `collected`, for a sharded model.

    A checkpoint of the same step keeps its tensors; state.json is written again, because the stage may have changed.
    """
    target = run / f"checkpoint-{progress.step:08}"
    random = random or [random_state(next(model.parameters()).device)]
    state = {"format": FORMAT, "processes": len(random), **asdict(progress)}
    if best is not None:
        state["best"] = best.state
    if target.exists() and not missing(target):
        write_json(target / "state.json", state)
        return target
    shutil.rmtree(target, ignore_errors=True)
    for left_by_a_kill in run.glob(".checkpoint-*"):
        shutil.rmtree(left_by_a_kill)
    if tensors is None:
        tensors = collected(model, optimizer, average, random, best)
    unfinished = Path(tempfile.mkdtemp(prefix=".checkpoint-", dir=run))
    try:
        parts = list(split(tensors, PART_BYTES))
        for number, part in enumerate(parts, start=1):
            save_file(part, unfinished / part_name(number, len(parts)))
        write_json(unfinished / "state.json", state)
        unfinished.chmod(0o755)
        os.replace(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for other in folders(run):
        if other != target:
            shutil.rmtree(other)
    return target


def load(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None = None,
    *,
    best: BestWeights | None = None,
    rank: int = 0,
) -> Progress:
    lacking = missing(checkpoint)
    if lacking:
        raise ValueError(f"{checkpoint} must be whole; it lacks {', '.join(lacking)}")
    what = "a checkpoint of this run"
    state = read_json(checkpoint / "state.json", "the state of a checkpoint", "format", "step", "seconds")
    if state.pop("format") != FORMAT:
        raise ValueError(f"{checkpoint} must have the checkpoint format {FORMAT}; written by another version")
    of_best = state.pop("best", None)
    processes = state.pop("processes", 1)  # older checkpoints
    tensors: dict[str, Tensor] = {}
    for part in sorted(checkpoint.glob("part-*.safetensors")):
        tensors |= contents(part, "a part of a checkpoint")[0]
    with reading(checkpoint / "state.json", "the state of a checkpoint"):
        progress = Progress(**state)
        if type(progress.step) is not int or type(processes) is not int or not isinstance(progress.details, dict):
            raise ValueError(f"step {progress.step!r}, processes {processes!r} and details {progress.details!r}")
    places = model.state_dict()
    weights = under("model", tensors)
    check_alike(checkpoint, what, weights, places)
    with reading(checkpoint, what):
        model.load_state_dict({name: divided_like(each, places[name]) for name, each in weights.items()})
        if average is not None:
            average.load(under("average", tensors))
        if best is not None:
            best.load(of_best, under("best", tensors))
    names = parameter_names(model, optimizer)
    optimizer_state = {index: under(f"optimizer.{name}", tensors) for index, name in names.items()}
    kept = set().union(*optimizer_state.values())
    for index, name in names.items():
        # Otherwise the optimiser would silently start afresh.
        if not kept or optimizer_state[index].keys() != kept:
            raise ValueError(f"{checkpoint} must have the optimiser's state of every parameter; {name} has none")
    parameters = dict(model.named_parameters())
    for index, name in names.items():
        state_of = optimizer_state[index]
        for key, each in state_of.items():
            if each.shape not in (parameters[name].shape, torch.Size([])):
                raise ValueError(
                    f"{checkpoint} must be {what}; {key} of {name} is {list(each.shape)} in the file and must be "
                    f"{list(parameters[name].shape)}"
                )
        optimizer_state[index] = {key: divided_like(each, parameters[name]) for key, each in state_of.items()}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": optimizer_state, "param_groups": groups})
    random = under(f"random.{rank}" if rank else "random", tensors)
    device = next(model.parameters()).device
    if "cpu" in random:
        with reading(checkpoint, what):
            torch.set_rng_state(random["cpu"])
    elif rank < processes:
        raise ValueError(f"{checkpoint} must have the random state of process {rank}; it has none")
    else:
        torch.manual_seed(torch.initial_seed() + progress.step)
    if "cuda" in random and device.type == "cuda":
        with reading(checkpoint, what):
            torch.cuda.set_rng_state(random["cuda"], device)
    return progress


def random_state(device: torch.device) -> RandomState:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def folders(run: Path) -> list[Path]:
    return sorted(run.glob("checkpoint-*"))


def checkpoints(run: Path) -> list[Path]:
    return [checkpoint for checkpoint in folders(run) if not missing(checkpoint)]


def newest(run: Path) -> Path | None:
    found, whole = folders(run), checkpoints(run)
    if found and not whole:
        raise ValueError(
            f"{found[-1]} must be whole to go on from; it lacks {', '.join(missing(found[-1]))}. Copy what is "
            "missing, or begin anew with --overwrite"
        )
    return whole[-1] if whole else None


def missing(checkpoint: Path) -> list[str]:
    names = {path.name for path in checkpoint.glob("part-*-of-*.safetensors")}
    counts = {int(name.removesuffix(".safetensors").split("-")[-1]) for name in names} or {1}
    wanted = ["state.json", *(part_name(number, count) for count in counts for number in range(1, count + 1))]
    return [name for name in wanted if not (checkpoint / name).is_file()]


def part_name(number: int, count: int) -> str:
    return f"part-{number:02}-of-{count:02}.safetensors"


def remove(run: Path) -> None:
    for checkpoint in folders(run):
        shutil.rmtree(checkpoint)


def collected(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None,
    random: list[RandomState],
    best: BestWeights | None = None,
) -> dict[str, Tensor]:
    """If the model is sharded, all processes call this together."""
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for prefix, kept in (("average", average), ("best", best)):
        if kept is not None:
            found |= {f"{prefix}.{name}": tensor for name, tensor in kept.weights.items()}
    names = parameter_names(model, optimizer)
    for index, values in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{names[index]}.{key}": tensor for key, tensor in values.items()}
    for rank, state in enumerate(random):
        prefix = f"random.{rank}" if rank else "random"
        found |= {f"{prefix}.{key}": tensor for key, tensor in state.items()}
    return {name: whole(tensor.detach()).cpu().contiguous() for name, tensor in found.items()}


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: names[parameter] for index, parameter in enumerate(parameters)}


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name[len(start) :]: tensor for name, tensor in tensors.items() if name.startswith(start)}
