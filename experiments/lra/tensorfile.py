"""Tensors in one safetensors file, with plain values that say what they are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


def write(path: Path, model: nn.Module, about: dict[str, Any]) -> None:
    """Write a model's weights. about: among them its "kind", by which `read` tells it from other files."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    unfinished = path.with_name(f".{path.name}.unfinished")
    # One entry: several vary in order, and the file's hash with them.
    save_file(tensors, unfinished, metadata={"about": json.dumps(about, sort_keys=True)})
    unfinished.chmod(0o644)  # safetensors makes it private
    unfinished.replace(path)


def read(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, and what is said of them.

    Raises FileNotFoundError where there is none, and ValueError where it holds no tensors or those of another kind.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} must hold an {kind}: {error}") from None
    if about.get("kind") != kind:
        raise ValueError(f"{path} must hold an {kind}; got {about.get('kind')!r}")
    return tensors, about


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()  # a few MB
