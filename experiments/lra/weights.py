"""The weights that a run ends with, in safetensors files below 15 MiB, and a model that begins with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from experiments.lra import tensorfile
from experiments.lra.checkpoint import PART_BYTES
from experiments.lra.config import Config, as_dict

FILE = "model.safetensors"
KIND = "experiments.lra model"
_HEADS = ("head.", "namer.", "tracer.")  # what answers with the encoder's features


def save(path: Path, model: nn.Module, config: Config, cost: dict[str, Any]) -> None:
    """Write the weights, with the settings and what they cost.

    cost: plain values that say how much training the weights have seen.
    """
    tensorfile.write(path, model, {"kind": KIND, "config": as_dict(config), "cost": cost}, limit=PART_BYTES)


def begin_from(model: nn.Module, path: Path) -> dict[str, Any]:
    """Put the weights of a finished run into a model's encoder, and into what else both have in the same shape.

    path: its file, one of its parts, or the run's folder. Returns what must be told with the model's result: the
    SHA-256 of the file, or of all parts in their order, and what it cost. Raises FileNotFoundError where a file is
    missing, and ValueError where it is another one or its encoder has other sizes.
    """
    found, about = tensorfile.read(path, KIND)
    own = model.state_dict()
    encoder, others = ({name for name in names if not name.startswith(_HEADS)} for names in (own, found))
    differing = sorted(encoder ^ others) or sorted(name for name in encoder if own[name].shape != found[name].shape)
    if differing:
        raise ValueError(
            f"{path} must hold an encoder of this run's depth, width, heads, mlp, positions and vocabulary; "
            f"{described(differing[0], own, found)}"
        )
    same = {name: tensor for name, tensor in found.items() if name in own and own[name].shape == tensor.shape}
    model.load_state_dict({**own, **same})
    return {
        "sha256": tensorfile.sha256(*tensorfile.files(path)),
        "objective": about["config"]["objective"],
        **about["cost"],
    }


def described(name: str, own: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    """How a tensor differs."""
    shapes = [list(tensors[name].shape) if name in tensors else "missing" for tensors in (own, found)]
    return f"{name} is {shapes[0]} here and {shapes[1]} there"
