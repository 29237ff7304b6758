"""The tested weights of a run, in files below 15 MiB."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.lra.config import DEFAULTS, Config, as_dict
from experiments.training import tensor_files
from experiments.training.fingerprint import check_disjoint, sha256
from experiments.training.reading import reading

FILE = "model.safetensors"
KIND = "experiments.lra model"
# They change the meaning of weights but not their shapes.
_MEANINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "heads": itemgetter("heads"),
    "head_dim": lambda config: config["head_dim"] or config["width"] // config["heads"],
    "positions": itemgetter("positions"),
    "qk_norm": itemgetter("qk_norm"),
    # [CLS] shifts all positions by one.
    "place of the first token": lambda config: int(
        config["pool"] == "cls" and config["positions"] in ("learned", "sinusoidal")
    ),
}
_COSTS = ("objective", "steps", "tested_step", "seconds", "token_labels")
_SCALE = ".scale"  # after the name of a matrix in 8 bits
_HEADS = ("head.", "namer.", "tracer.")


def save(
    path: Path,
    model: nn.Module,
    config: Config,
    cost: dict[str, Any],
    seen: Sequence[dict[str, str]],
    test_accuracy: float,
) -> None:
    """With settings, costs, training data and the accuracy on the test split.

    cost: plain values. seen: fingerprints of the data of this and earlier runs.
    """
    about = {
        "kind": KIND,
        "config": as_dict(config),
        "cost": cost,
        "seen": list(seen),
        "test_accuracy": test_accuracy,
    }
    tensor_files.write(path, model, about, limit=tensor_files.PART_BYTES)


def store(path: Path, folder: Path, bits: int = 16, figure: str | None = None) -> Path:
    """Stores weights rounded to fp16, half the bytes, or to 8 bits. Raises ValueError for other files.

    figure: the name of the run's stored accuracy, to be written into the file.
    """
    if bits not in (8, 16):
        raise ValueError(f"bits must be 8 or 16; got {bits}")
    tensors, about = read(path)
    stored = folder / FILE
    if stored in tensor_files.files(path):
        raise ValueError(f"the folder must be another one than the run's; got {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Tensor] = {}
    for name, each in tensors.items():
        if bits == 8 and each.ndim == 2 and each.shape[1] > 1:
            kept |= in_bytes(name, each)
        else:
            kept[name] = each.half()
    tensor_files.write(stored, kept, about if figure is None else {**about, "figure": figure})
    return stored


def in_bytes(name: str, matrix: Tensor) -> dict[str, Tensor]:
    """A matrix as whole numbers from -127 to 127, with the scale of each row."""
    scale = (matrix.float().abs().amax(1, keepdim=True) / 127).clamp(min=2**-14).half()
    return {name: (matrix / scale.float()).round().clamp(-127, 127).to(torch.int8), f"{name}{_SCALE}": scale}


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, and what it says about them. Raises ValueError for other files."""
    found, about = tensor_files.read(path, KIND, "config", "cost")
    with reading(path, f"a file of an {KIND} with a scale for each matrix of whole numbers"):
        return {
            name: each.float() * found[f"{name}{_SCALE}"].float() if each.dtype == torch.int8 else each
            for name, each in found.items()
            if not name.endswith(_SCALE)
        }, about


def begin_from(model: nn.Module, path: Path, config: Config, data: dict[str, str]) -> dict[str, Any]:
    """Into a model's encoder, and other parts of equal shape.

    config, data: of the new run. Returns facts for the result.
    """
    found, about = read(path)
    own = model.state_dict()
    encoder, others = ({name for name in names if not name.startswith(_HEADS)} for names in (own, found))
    differing = sorted(encoder ^ others) or sorted(name for name in encoder if own[name].shape != found[name].shape)
    if differing:
        raise ValueError(
            f"{path} must hold an encoder of this run's depth, width, heads, mlp, positions and vocabulary; "
            f"{described(differing[0], own, found)}"
        )
    with reading(path, f"a file of an {KIND} with its settings and its cost"):
        before, cost = {**DEFAULTS, **about["config"]}, {**about["cost"]}
    check_alike(path, before, as_dict(config))
    check_disjoint(path, about.get("seen"), data)
    same = {name: tensor for name, tensor in found.items() if name in own and own[name].shape == tensor.shape}
    model.load_state_dict({**own, **same})
    return {
        "sha256": sha256(*tensor_files.files(path)),
        "task": before["task"],
        "seen": about.get("seen"),
        "objective": before["objective"],
        **cost,
    }


def runs_before(initial: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Oldest first."""
    if initial is None:
        return []
    last = {name: initial[name] for name in _COSTS if name in initial}
    return [*initial.get("before", []), last]


def check_alike(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    for name, meaning in _MEANINGS.items():
        was, now = meaning(there), meaning(here)
        if was != now:
            raise ValueError(f"{path} must hold an encoder like this run's: {name} is {was} there, and {now} here")


def described(name: str, own: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    shapes = [list(tensors[name].shape) if name in tensors else "missing" for tensors in (own, found)]
    return f"{name} is {shapes[0]} here and {shapes[1]} there"
