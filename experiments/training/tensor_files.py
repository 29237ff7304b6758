"""A model's tensors in safetensors files, with plain values that describe them.

<folder>/model.safetensors                      in one file, or
<folder>/model-00001-of-00003.safetensors ...   in several of bounded size, named as Hugging Face's are
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.training.reading import checked, reading

SUFFIX = ".safetensors"
# Below the limit of 16 MiB that some stores set.
PART_BYTES = 15 * 2**20
_KIND = re.compile(r"(?:experiments\.)?(lra|lm|pathx) [a-z ]{,30}")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")

MOST_BLOCKS = 2**14  # dense: 2^28 tiles

Model = TypeVar("Model", bound=nn.Module)


def write(
    path: Path, model: nn.Module | Mapping[str, Tensor], about: dict[str, Any], *, limit: int | None = None
) -> None:
    """Other files with that name, whole or in parts, are removed.

    about: with the file's "kind", which `read` checks. limit: bytes of a file; a larger tensor gets its own.
    """
    weights = model.state_dict() if isinstance(model, nn.Module) else model
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    header = json.dumps(about, sort_keys=True)
    parts = [tensors] if limit is None else list(split(tensors, limit - len(header)))
    count = len(parts)
    paths = [path] if count == 1 else [part_of(path, number, count) for number in range(1, count + 1)]
    unfinished = [each.with_name(f".{each.name}.unfinished") for each in paths]
    for part, place in zip(parts, unfinished, strict=True):
        # Several entries would be written in varying order.
        save_file(part, place, metadata={"about": header})
        place.chmod(0o644)
    for place, each in zip(unfinished, paths, strict=True):
        place.replace(each)
    remove(path, but=paths)


def read(path: Path, kind: str, *names: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    headers: list[dict[str, Any]] = []
    for each in files(path):
        found, about = contents(each, f"a file of an {kind}")
        tensors |= found
        headers.append(about)
        if about.get("kind") != kind:
            raise ValueError(f"{each} must hold an {kind}; got {_told(about.get('kind'))}")
        if headers[-1] != headers[0]:
            raise ValueError(f"{each} must be a part of the same model as the first part; got one of another run")
    return tensors, checked(path, f"a file of an {kind}", headers[0], *names)


def _told(kind: object) -> str:
    other = _KIND.fullmatch(str(kind))
    return f"an {kind}: use python -m experiments.{other[1]}" if other else repr(kind)[:60]


def contents(path: Path, what: str, framework: str = "pt") -> tuple[dict[str, Any], dict[str, Any]]:
    with reading(path, what):
        try:
            with safe_open(path, framework=framework) as file:
                about = json.loads((file.metadata() or {}).get("about", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
        except SafetensorError as error:
            raise ValueError(error) from None
    return tensors, checked(path, what, about)


def filled(path: Path, tensors: Mapping[str, Tensor], made: Callable[[], Model], layers: int) -> Model:
    """The model that `made` makes from the settings, with the tensors.

    Settings could ask for any size, so a model on the meta device is compared first.
    """
    what = "a model with the sizes of its own settings"
    if layers > len(tensors):
        raise ValueError(f"{path} must be {what}; got {len(tensors)} tensors for {layers} layers")
    with reading(path, what), torch.device("meta"):
        wanted = made().state_dict()
    check_alike(path, what, tensors, wanted)
    with reading(path, what):
        model = made()
        model.load_state_dict(dict(tensors))
    return model


def check_length(path: Path, length: int, block: int) -> None:
    if length > MOST_BLOCKS * block:
        raise ValueError(
            f"{path} must ask for a mask of at most {MOST_BLOCKS} blocks of {block} tokens; got {length} tokens"
        )


def check_alike(path: Path, what: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name in sorted(found.keys() | wanted.keys()):
        shapes = [list(each[name].shape) if name in each else "missing" for each in (found, wanted)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{path} must be {what}; {name} is {shapes[0]} in the file and must be {shapes[1]}")


def files(path: Path) -> list[Path]:
    if path.is_dir():
        path = path / f"model{SUFFIX}"
    if path.suffix == SUFFIX and (found := _PART.fullmatch(path.stem)):
        path = path.with_name(found[1] + SUFFIX)
    elif path.is_file():
        return [path]
    counts = {int(found[3]) for each in parts_beside(path) if (found := _PART.fullmatch(each.stem))}
    if not counts:
        raise FileNotFoundError(
            f"there is no file {path}" + (", which a run writes at its end" if path.parent.is_dir() else "")
        )
    if len(counts) > 1:
        raise ValueError(f"{path.parent} must hold the parts of one {path.name}; got some of {sorted(counts)} parts")
    count = counts.pop()
    wanted = [part_of(path, number, count) for number in range(1, count + 1)]
    missing = [each.name for each in wanted if not each.is_file()]
    if missing:
        raise FileNotFoundError(f"{path.parent} lacks {', '.join(missing)}")
    return wanted


def folder_of(path: Path) -> Path:
    return files(path)[0].parent


def remove(path: Path, but: Sequence[Path] = ()) -> None:
    for each in {path, *parts_beside(path)} - {*but}:
        each.unlink(missing_ok=True)


def part_of(path: Path, number: int, count: int) -> Path:
    return path.with_name(f"{path.stem}-{number:05}-of-{count:05}{SUFFIX}")


def parts_beside(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.stem}-[0-9]*-of-[0-9]*{SUFFIX}"))


def split(tensors: dict[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        need = tensor.nbytes + len(name) + 128
        if part and size + need > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += need
    yield part
