"""A trained model as one file, and beside it a file with its hash and its results.

model.safetensors   the weights in fp32, with the settings to build the model
model.json          the SHA-256 of that file, the cost of training, and the results; see evaluate.py

The weights in `experiments/results` are rounded to fp16: `stored` has the hash of the rounded file, `sha256` of the
tested weights, which later runs cite.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from experiments.pathfinder.parameters import MARKER_COUNTS
from experiments.pathx.config import Config, as_dict, from_dict
from experiments.pathx.data.packing import LEVELS
from experiments.pathx.masks.relations import parse_layers
from experiments.pathx.model.classifier import PathModel
from experiments.pathx.model.unet import UNet
from experiments.training import tensor_files
from experiments.training.atomic_files import write_json
from experiments.training.fingerprint import sha256
from experiments.training.reading import read_json, reading

KIND = "experiments.pathx model"

Model = PathModel | UNet


def build(config: Config) -> Model:
    torch.manual_seed(config.seed)
    if config.model == "unet":
        return UNet(config.width, config.mlp)
    return PathModel(
        depth=len(parse_layers(config.layers)),
        width=config.width,
        heads=config.heads,
        head_dim=config.head_dim,
        mlp=config.mlp,
        dropout=config.dropout,
        registers=config.registers,
        pixel_classes=(LEVELS if config.hidden else MARKER_COUNTS) if config.auxiliary else 0,
        smooth=config.intensity == "smooth",
        line=config.positions == "line",
    )


def for_training(config: Config, device: torch.device) -> Model:
    model = build(config).to(device)
    if config.compiled and isinstance(model, PathModel):
        model.compile_layers()
    return model


def save(path: Path, model: Model, config: Config, about: dict[str, Any]) -> None:
    tensor_files.write(path, model, {"kind": KIND, "config": as_dict(config), **about})
    write_json(path.with_suffix(".json"), {"sha256": sha256(path), **about, "results": {}})


def file_in(path: Path) -> Path:
    return path / "model.safetensors" if path.is_dir() else path


def load(path: Path, expected: str | None = None) -> tuple[Model, Config, dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if expected is None:
        expected = hash_of(beside(path))
    found = sha256(path)
    if found != expected:
        raise ValueError(f"{path} must have the SHA-256 {expected}; got {found}: it is another file, or damaged")
    tensors, about = tensor_files.read(path, KIND, "config")
    with reading(path, f"a file of an {KIND} with its settings"):
        config = from_dict(about["config"])
        layers = len(parse_layers(config.layers)) if config.model == "attention" else 0
    return tensor_files.filled(path, tensors, lambda: build(config), layers), config, about


def is_whole(path: Path) -> bool:
    return path.is_file() and path.with_suffix(".json").is_file() and sha256(path) == hash_of(beside(path))


def hash_of(note: dict[str, Any]) -> str:
    return str(note.get("stored", note)["sha256"])


def beside(path: Path) -> dict[str, Any]:
    note = path.with_suffix(".json")
    if not note.is_file():
        tensor_files.read(path, KIND)  # raises an error that names the program of another kind of model
        raise FileNotFoundError(f"{path} is not loaded without its SHA-256, which {note} would hold; pass --sha256")
    return read_json(note, "the file that belongs to weights", "sha256")
