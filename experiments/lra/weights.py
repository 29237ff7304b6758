"""The weights that a run ends with, in one safetensors file, and a model that begins with them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.lra.config import Config, as_dict

FILE = "model.safetensors"
KIND = "experiments.lra model"
_HEADS = ("head.", "namer.")  # what answers with the encoder's features


def save(path: Path, model: nn.Module, config: Config, cost: dict[str, Any]) -> None:
    """Write the weights, with the settings and what they cost.

    cost: plain values that say how much training the weights have seen.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    about = {"kind": KIND, "config": as_dict(config), "cost": cost}
    unfinished = path.with_name(f".{path.name}.unfinished")
    save_file(tensors, unfinished, metadata={"about": json.dumps(about, sort_keys=True)})  # one entry: the order varies
    unfinished.chmod(0o644)  # safetensors makes it private
    unfinished.replace(path)


def begin_from(model: nn.Module, path: Path) -> dict[str, Any]:
    """Put the weights of a finished run into a model's encoder, and into its head if both have one of the same shape.

    Returns what must be told with the model's result: the file's SHA-256, and what it cost. Raises FileNotFoundError
    where there is no file, and ValueError where it is another one or its encoder has other sizes.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there are no weights {path}; a run writes its own to {FILE} when it ends")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} must be the {FILE} of a run: {error}") from None
    if about.get("kind") != KIND:
        raise ValueError(f"{path} must be the {FILE} of a run; got {about.get('kind')!r}")
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
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "objective": about["config"]["objective"],
        **about["cost"],
    }


def described(name: str, own: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    """How a tensor differs."""
    shapes = [list(tensors[name].shape) if name in tensors else "missing" for tensors in (own, found)]
    return f"{name} is {shapes[0]} here and {shapes[1]} there"
