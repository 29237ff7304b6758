"""Pathfinder, Path-X, Path-256, from released folders or a file of `python -m experiments.pathfinder generate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from experiments.lra.data.examples import Examples, Row, cached
from experiments.lra.tasks.task import Data, Kinds, Options, Task
from experiments.pathfinder.parameters import LABEL, MARKER_COUNTS, Parameters
from experiments.pathfinder.released import Sample, find, grey_pixels, is_empty, number_of, samples_in, split_rows
from experiments.training.reading import read_json, reading

if TYPE_CHECKING:
    from experiments.pathfinder.vectors import Vectors

SIDES = (32, 64, 128, 256)
TASKS = {
    f"pathfinder{side}": Task(f"pathfinder{side}", 258, 2, longest=side * side, side=side, token_classes=MARKER_COUNTS)
    for side in SIDES
}

FOLDS = {
    "easy": "curv_baseline",
    "intermediate": "curv_contour_length_9",
    "hard": "curv_contour_length_14",
}
CONTOURS = {"easy": 6, "intermediate": 9, "hard": 14}
SPLITS = ("shuffled", "ordered")
_RENDERED_AT_ONCE = 500
_IMAGES_FOR_SHORTCUTS = 10_000


def advice(task: Task) -> str:
    return (
        f"write {task.name} with `python -m experiments.pathfinder generate --size {task.side} --contour 14` and pass "
        "its folder data/pathfinder, or the unpacked Long Range Arena release (linked from "
        "google-research/long-range-arena)"
    )


def load(task: Task, folder: Path, options: Options) -> Data:
    """Four fifths for training, a tenth each for validation and testing.

    "shuffled": `torch.utils.data.random_split` with seed 42, as in S4 and MEGA; "ordered": file order.
    """
    if options.difficulty not in FOLDS:
        raise ValueError(f"difficulty must be one of {', '.join(FOLDS)}; got {options.difficulty!r}")
    if options.split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {options.split!r}")
    if folder.is_file():
        return load_generated(task, folder.resolve(), options)
    fold = FOLDS[options.difficulty]
    try:
        place = find(task.name, folder, fold)
    except FileNotFoundError:
        generated = generated_in(folder, task, options.difficulty)
        if not generated:
            others = [each for each in FOLDS if generated_in(folder, task, each)]
            if not others:
                raise
            raise ValueError(
                f"the data folder {folder} has generated images of {task.name} for --difficulty "
                f"{' and '.join(others)}; got --difficulty {options.difficulty}"
            ) from None
        if len(generated) > 1:
            names = ", ".join(path.name for path in generated)
            raise ValueError(f"the data folder {folder} must hold one such file; got {names}: name it") from None
        return load_generated(task, generated[0].resolve(), options)
    metadata = sorted((place / "metadata").glob("*.npy"), key=number_of)
    samples = samples_in(place)
    everything = cached(
        place, f"{task.name}-{fold}", metadata, lambda: rows_of(samples, task.longest), shift=1, total=len(samples)
    )  # fmt: skip
    if (place / LABEL).is_file():
        what = "the parameters and the seed of generated images"
        about = read_json(place / LABEL, what, "parameters", "seed")
        with reading(place / LABEL, what):
            parameters, seed = Parameters.from_json(json.dumps(about["parameters"])), about["seed"]
        return Data(task, place, generated_origin(parameters, seed), True, *split(everything, options, place))
    return Data(task, place, f"{task.name}, {fold}, released", False, *split(everything, options, place))


def rows_of(samples: list[Sample], pixels: int) -> Iterator[Row]:
    for sample in samples:
        if not is_empty(sample):
            yield sample.label, (grey_pixels(sample.image, pixels).tobytes(),)


def generated_origin(parameters: Parameters, seed: int) -> str:
    return f"{parameters.name}, generated, seed {seed}"


def generated_in(folder: Path, task: Task, difficulty: str) -> list[Path]:
    return sorted(folder.glob(f"{task.name}-cl{CONTOURS[difficulty]}-generated-*.safetensors"))


def load_generated(task: Task, path: Path, options: Options) -> Data:
    """Rendered into the cache once; baselines are rules that do not trace, and a stored small 2-D CNN."""
    from experiments.pathfinder.bins import marker_distances
    from experiments.pathfinder.cnn.results import stored
    from experiments.pathfinder.owners import marker_counts
    from experiments.pathfinder.render import render
    from experiments.pathfinder.shortcuts import Shortcut, pairs, shortcuts
    from experiments.pathfinder.vectors import load as load_vectors

    vectors = load_vectors(path)
    size, contour = vectors.parameters.size, vectors.parameters.contour_length
    if (size, contour) != (task.side, CONTOURS[options.difficulty]):
        raise ValueError(
            f"{task.name}, {options.difficulty}, needs images of {task.side} pixels with paths of "
            f"{CONTOURS[options.difficulty]} dashes; {path} has {size} pixels and {contour} dashes"
        )
    everything = cached(
        path.parent, path.stem, [path], partial(image_rows, vectors, render), shift=1, total=len(vectors)
    )

    @cache
    def fitted() -> list[Shortcut]:
        return shortcuts(pairs(vectors)[:_IMAGES_FOR_SHORTCUTS])

    def rules() -> list[tuple[str, float]]:
        found = [(each.rule, each.accuracy) for each in fitted()]
        cnn = stored(vectors.parameters.name)
        return found if cnn is None else [*found, (cnn["rule"], cnn["accuracy"])]

    def by_distance() -> Kinds:
        near, middle, far = borders = fitted()[0].distances
        names = (f"to {near:.0f} px", f"to {middle:.0f} px", f"to {far:.0f} px", "farther")
        quarters = np.searchsorted(np.array(borders), marker_distances(vectors))
        tested = dealt_out(len(vectors), options, path)[2]
        return Kinds("marker distance", names, quarters[tested], {each.rule: each.by_distance for each in fitted()})

    def token_labels() -> Examples:
        name = f"{path.stem}-markers"
        rows = partial(image_rows, vectors, marker_counts)
        counts = cached(path.parent, name, [path], rows, shift=0, total=len(vectors))
        return split(counts, options, path)[0]

    origin = generated_origin(vectors.parameters, vectors.seed)
    return Data(
        task,
        path,
        origin,
        True,
        *split(everything, options, path),
        shortcuts=rules,
        kinds=by_distance,
        token_labels=token_labels,
    )


def image_rows(vectors: Vectors, arrays: Callable[[Vectors, int, int], NDArray[np.uint8]]) -> Iterator[Row]:
    for first in range(0, len(vectors), _RENDERED_AT_ONCE):
        images = arrays(vectors, first, min(first + _RENDERED_AT_ONCE, len(vectors)))
        for label, image in zip(vectors.labels[first:].tolist(), images):
            yield label, (image.tobytes(),)


def split(everything: Examples, options: Options, place: Path) -> tuple[Examples, Examples, Examples]:
    train, val, test = map(everything.take, dealt_out(len(everything), options, place))
    return train, val, test


def dealt_out(images: int, options: Options, place: Path) -> tuple[NDArray[np.int64], ...]:
    if images < 10:
        raise ValueError(f"{place} must hold at least 10 images, for three splits; it has {images}")
    return split_rows(images, shuffled=options.split == "shuffled")
