"""Batches of images: endless batches for training, fresh or from a file, and batches for testing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.pathfinder import testset
from experiments.pathfinder.draw import draw
from experiments.pathfinder.generate import Settings, generate
from experiments.pathfinder.parameters import Parameters
from experiments.pathfinder.render_device import DeviceRenderer
from experiments.pathfinder.seeds import TEST_SEED, image_index, training_seed
from experiments.pathfinder.vectors import Vectors, collect
from experiments.training.prefetch import Prefetcher


class Batch(NamedTuple):
    images: Tensor  # uint8 [B, S, S]
    labels: Tensor  # int64 [B]


def fresh(
    parameters: Parameters, seed: int, size: int, prefetcher: Prefetcher, device: torch.device
) -> Generator[Batch, None, None]:
    """Batches of `size` images that are used once. seed: the run's; no other run and no test shares its images."""
    calls = ((parameters, training_seed(seed), step, size) for step in count())
    everything = torch.arange(size)
    for vectors in prefetcher.in_order(drawn_for, calls):
        yield batch(DeviceRenderer(vectors, device), vectors, everything)


def drawn_for(parameters: Parameters, seed: int, step: int, size: int) -> Vectors:
    places = range(size)
    return collect(parameters, seed, [draw(parameters, seed, image_index(0, step, place)) for place in places])


def repeated(vectors: Vectors, seed: int, size: int, device: torch.device) -> Generator[Batch, None, None]:
    if len(vectors) < size:
        raise ValueError(f"a batch must not exceed the file's {len(vectors)} images; got {size}")
    renderer = DeviceRenderer(vectors, device)
    rng = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(vectors), generator=rng)
        for first in range(0, len(vectors) - size + 1, size):
            images, labels = batch(renderer, vectors, order[first : first + size])
            way = int(torch.randint(8, (), generator=rng))
            yield Batch(turned(images, way), labels)


def turned(images: Tensor, way: int) -> Tensor:
    flipped = [axis for axis in (1, 2) if way & axis]
    images = images.flip(flipped) if flipped else images
    return images.transpose(1, 2) if way & 4 else images


def batch(renderer: DeviceRenderer, vectors: Vectors, indices: Tensor) -> Batch:
    labels = torch.from_numpy(vectors.labels[indices.numpy()]).to(renderer.device).long()
    return Batch(renderer(indices), labels)


def in_order(vectors: Vectors, size: int, device: torch.device) -> Iterator[Batch]:
    renderer = DeviceRenderer(vectors, device)
    for indices in torch.arange(len(vectors)).split(size):
        yield batch(renderer, vectors, indices)


def test_file(
    parameters: Parameters,
    images: int,
    folder: Path,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Path:
    """Test images, with a seed that no training uses, written if missing; with the arena's parameters the common test
    set, checked by its hash."""
    if parameters.is_lra and images == testset.IMAGES:
        return testset.test_set(parameters.size, parameters.contour_length, folder, workers=workers, progress=progress)
    return generate(Settings(parameters, images, TEST_SEED), folder, workers=workers, progress=progress)


test_file.__test__ = False  # type: ignore[attr-defined]  # not a test of pytest's
