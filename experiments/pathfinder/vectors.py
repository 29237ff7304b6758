"""Images as vectors: lists of dashes, in one file with the parameters."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from experiments.pathfinder.draw import Drawing
from experiments.pathfinder.parameters import Parameters
from experiments.pathfinder.tables import digest, tables
from experiments.training.reading import checked, reading
from experiments.training.tensor_files import contents

KIND = "generated Pathfinder images as vectors"
FORMAT = 1  # increase it when the arrays change


@dataclass(frozen=True)
class Vectors:
    """n images, drawn from one seed.

    parameters, seed
    labels    uint8  [n]          1 if the markers are at the two ends of one target snake, 0 if they are on both
    marked    uint8  [n]          the target snake, 0 or 1, whose first end is marked
    margins   uint8  [n]          half the gap between dashes, in pixels
    attempts  uint32 [n]          pairs of target snakes drawn until one succeeded
    starts    int64  [n + 1]      the dashes of image i are starts[i]:starts[i + 1]: target 0, target 1,
                                  then each distractor, from its first end on
    places    uint8 or uint16 [d, 2]  (y, x) of the end where the dash begins, see tables.py
    headings  uint16 [d]          the dash's heading, see tables.py
    """

    parameters: Parameters
    seed: int
    labels: NDArray[np.uint8]
    marked: NDArray[np.uint8]
    margins: NDArray[np.uint8]
    attempts: NDArray[np.uint32]
    starts: NDArray[np.int64]
    places: NDArray[np.unsignedinteger]
    headings: NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def targets(self) -> NDArray[np.int64]:
        """In order along the snake. int64 [n, 2, contour_length]"""
        length = self.parameters.contour_length
        return self.starts[:-1, None, None] + np.arange(2 * length).reshape(2, length)

    @property
    def distractors(self) -> NDArray[np.int64]:
        dashes = np.diff(self.starts) - 2 * self.parameters.contour_length
        return dashes // self.parameters.distractor_length

    @property
    def tips(self) -> NDArray[np.int64]:
        length = self.parameters.contour_length
        ends = np.array([[0, length - 1], [length, 2 * length - 1]])
        return self.places[self.starts[:-1, None, None] + ends].astype(np.int64)

    @cached_property
    def markers(self) -> NDArray[np.int64]:
        """The first on a first end, the second on a last. int64 [n, 2, (y, x)]"""
        image, tips = np.arange(len(self)), self.tips
        last = np.where(self.labels == 1, self.marked, 1 - self.marked)
        return np.stack([tips[image, self.marked, 0], tips[image, last, 1]], axis=1)


def collect(parameters: Parameters, seed: int, drawings: Sequence[Drawing]) -> Vectors:
    dashes = np.concatenate([np.empty((0, 3), np.int64), *(drawing.dashes for drawing in drawings)])
    return Vectors(
        parameters,
        seed,
        np.array([drawing.label for drawing in drawings], np.uint8),
        np.array([drawing.marked for drawing in drawings], np.uint8),
        np.array([drawing.margin for drawing in drawings], np.uint8),
        np.array([drawing.attempts for drawing in drawings], np.uint32),
        np.cumsum([0, *(len(drawing.dashes) for drawing in drawings)], dtype=np.int64),
        dashes[:, :2].astype(place_type(parameters)),
        dashes[:, 2].astype(np.uint16),
    )


def join(parts: Sequence[Vectors]) -> Vectors:
    if not parts:
        raise ValueError("parts must hold at least one element")
    sources = {(part.parameters, part.seed) for part in parts}
    if len(sources) > 1:
        raise ValueError(f"parts must have the same parameters and seed; got {sources}")
    lengths = np.concatenate([np.diff(part.starts) for part in parts])
    names = ("labels", "marked", "margins", "attempts", "places", "headings")
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Vectors(parts[0].parameters, parts[0].seed, starts=starts, **arrays)


def place_type(parameters: Parameters) -> type[np.unsignedinteger]:
    return np.uint8 if parameters.size <= 256 else np.uint16


def save(vectors: Vectors, path: Path) -> None:
    arrays = {name: np.ascontiguousarray(getattr(vectors, name)) for name in array_types(vectors.parameters)}
    about = {
        "kind": KIND,
        "format": FORMAT,
        "parameters": vectors.parameters.to_json(),
        "seed": vectors.seed,
        "stamps": digest(vectors.parameters),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(arrays, unfinished, metadata={"about": json.dumps(about)})
    unfinished.chmod(0o644)
    os.replace(unfinished, path)


def load(path: Path) -> Vectors:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; `python -m experiments.pathfinder generate` writes one")
    arrays, about = contents(path, f"a file of {KIND}", framework="numpy")
    if about.get("kind") != KIND:
        raise ValueError(f"{path} must hold {KIND}; got {repr(about.get('kind'))[:60]}")
    checked(path, f"a file of {KIND}", about, "format", "parameters", "seed", "stamps")
    if about["format"] != FORMAT:
        raise ValueError(f"{path} must have format {FORMAT}, the one this version reads; got {about['format']}")
    with reading(path, f"a file of {KIND}"):
        parameters = Parameters.from_json(about["parameters"])
        if type(about["seed"]) is not int:
            raise ValueError(f"the seed {about['seed']!r}")
    if about["stamps"] != digest(parameters):
        raise ValueError(
            f"{path} was drawn with stamps {about['stamps']}, and these are {digest(parameters)}: with this version "
            "of Pillow its images would differ; install the version that constraints.txt names"
        )
    found, expected = {name: array.dtype for name, array in arrays.items()}, array_types(parameters)
    if found != expected:
        raise ValueError(f"{path} must hold the arrays {expected}; got {found}")
    vectors = Vectors(parameters, about["seed"], **arrays)
    check_values(path, vectors)
    return vectors


def array_types(parameters: Parameters) -> dict[str, type[np.generic]]:
    return {
        "labels": np.uint8,
        "marked": np.uint8,
        "margins": np.uint8,
        "attempts": np.uint32,
        "starts": np.int64,
        "places": place_type(parameters),
        "headings": np.uint16,
    }


def check_values(path: Path, vectors: Vectors) -> None:
    p, n = vectors.parameters, len(vectors)
    starts, places, headings = vectors.starts, vectors.places, vectors.headings
    each = (vectors.labels, vectors.marked, vectors.margins, vectors.attempts)
    shapes_hold = all(array.shape == (n,) for array in each) and starts.shape == (n + 1,) and headings.ndim == 1
    if not shapes_hold or places.shape != (len(headings), 2):
        raise ValueError(f"{path} is damaged: its arrays' shapes do not belong together")
    if starts[0] != 0 or starts[-1] != len(headings):
        raise ValueError(f"{path} is damaged: its images must have {len(headings)} dashes; got {starts[-1]}")
    others = np.diff(starts) - 2 * p.contour_length
    if (others < 0).any() or (others % p.distractor_length).any():
        raise ValueError(f"{path} is damaged: an image must have two whole targets and whole distractors")
    if (vectors.labels > 1).any() or (vectors.marked > 1).any() or not np.isin(vectors.margins, p.margins).all():
        raise ValueError(f"{path} is damaged: it has impossible labels, marked snakes or margins")
    if len(places) and places.max() >= p.size:
        raise ValueError(f"{path} is damaged: it has dashes outside the image")
    known = np.zeros(256, np.int64)
    known[list(p.margins)] = [len(tables(p, margin).step) for margin in p.margins]
    if (headings >= np.repeat(known[vectors.margins], np.diff(starts))).any():
        raise ValueError(f"{path} is damaged: it has impossible headings")
