"""Batches of fresh images, made by other processes ahead of the training loop.

A batch is a function of the settings, the stage, the step and the number of runs before this one. So the stream does
not depend on the number of processes, and a resumed run begins it in the middle.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import count, islice
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from experiments.lra.generate import available_cores
from experiments.lra.workers import leave_signals_to_parent, worker_pool
from experiments.pathfinder.owners import marker_counts
from experiments.pathfinder.vectors import Vectors, join
from experiments.pathx.config import Config, Stage, least_room
from experiments.pathx.hiding import hide
from experiments.pathx.packing import Packed, blocks_needed, pack, stack
from experiments.pathx.relations import Relation
from experiments.pathx.sources import VALIDATION_SEED, drawn, image_index, pixels, training_seed

AHEAD = 3  # batches that each process may be ahead of the loop
_FULLEST = 3300  # tokens that images of 128 and 256 pixels have at most, about
_FEWEST = 256  # tokens of an image, on average over a batch; those of 32 pixels and 6 dashes have 284

ReadyEvent = TypeVar("ReadyEvent")


@dataclass(frozen=True)
class Recipe:
    """What the batches of a stage depend on, beside the step."""

    number: int  # of the stage
    size: int
    contours: tuple[int, ...]  # of the images in turns; those that are not trained on have the first
    seed: int  # of the images
    background: str
    tokens: int
    layers: tuple[Relation, ...]
    block: int
    registers: int
    traced: bool  # with the marker counts of the pixels
    hidden: float = 0.0  # share of the drawn pixels, which are to be named


def recipe_of(config: Config, number: int, earlier: int = 0) -> Recipe:
    """The recipe of a stage. earlier: how many runs have trained the weights that the run begins with."""
    stage: Stage = config.curriculum[number]
    return Recipe(
        number, stage.size, stage.contours, training_seed(config.seed, earlier), stage.background, stage.tokens,
        config.layers_of(stage), config.block, config.registers, config.auxiliary > 0 and not config.hidden,
        config.hidden,
    )  # fmt: skip


def most_images(recipe: Recipe) -> int:
    """How many images a batch may have."""
    least = blocks_of_whole(recipe) if recipe.background == "keep" else -(-_FEWEST // recipe.block)
    return max(1, recipe.tokens // recipe.block // least)


def most_blocks(recipe: Recipe) -> int:
    """How many blocks an image may be expected to have at most."""
    if recipe.background == "keep":
        return blocks_of_whole(recipe)
    return -(-(recipe.registers + least_room(recipe.size)) // recipe.block)


def blocks_of_whole(recipe: Recipe) -> int:
    """The blocks of an image all of whose pixels are tokens."""
    return recipe.size**2 // recipe.block + (recipe.registers > 0)


def make(recipe: Recipe, step: int) -> Packed:
    """The batch of a step (from 0): images in the order of their indices, up to the first that has no room left."""
    blocks = recipe.tokens // recipe.block
    keeps = recipe.background == "keep"
    images, labels, traced = [], [], []
    left, most = blocks, most_images(recipe)
    while len(images) < most:
        contour = recipe.contours[len(images) % len(recipe.contours)]
        vectors = drawn(recipe.size, contour, recipe.seed, image_index(recipe.number, step, len(images)))
        image = pixels(vectors)[0]
        left -= blocks_of_whole(recipe) if keeps else blocks_needed(image, recipe.registers, recipe.block)
        if left < 0:
            break
        images.append(image)
        labels.append(int(vectors.labels[0]))
        if recipe.traced:
            traced.append(marker_counts(vectors)[0])
    common = {"block": recipe.block, "registers": recipe.registers, "traced": traced if recipe.traced else None}
    if keeps:
        packed = stack(images, labels, recipe.layers, **common)
    else:
        packed = pack(images, labels, recipe.layers, blocks=blocks, **common)
    if not recipe.hidden:
        return packed
    return hide(packed, recipe.hidden, np.random.default_rng([recipe.seed, image_index(recipe.number, step, 0)]))


def pack_vectors(recipe: Recipe, vectors: Vectors, first: int = 0, last: int | None = None) -> Packed:
    """Images first .. last - 1 as one batch, as long as it needs to be."""
    images = list(pixels(vectors, first, last))
    labels = vectors.labels[first:last].tolist()
    traced = list(marker_counts(vectors, first, last)) if recipe.traced else None
    form = stack if recipe.background == "keep" else pack
    return form(images, labels, recipe.layers, block=recipe.block, registers=recipe.registers, traced=traced)


def draw_and_pack(recipe: Recipe, first: int, last: int) -> Packed:
    """Images first .. last - 1 of the recipe's seed as one batch."""
    drawings = [drawn(recipe.size, recipe.contours[0], recipe.seed, index) for index in range(first, last)]
    return pack_vectors(recipe, join(drawings))


def images_at_once(recipe: Recipe) -> int:
    """How many images make a batch of about the recipe's tokens, when all are to be seen."""
    most = recipe.size**2 if recipe.background == "keep" else min(recipe.size**2, _FULLEST)
    return max(1, recipe.tokens // most)


class Stream:
    """Processes that make batches; 0 workers: this process makes each when it is asked for.

    waited: seconds that the loop has waited for batches.
    """

    def __init__(self, workers: int | None = None) -> None:
        """workers: by default one for each available core but one, and at least one."""
        self.workers = max(1, available_cores() - 1) if workers is None else workers
        self.waited = 0.0
        self._pool: ProcessPoolExecutor | None = None
        if self.workers:
            self._pool = worker_pool(self.workers, _quiet)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def batches(self, recipe: Recipe, first_step: int) -> Iterator[Packed]:
        """The batches of the steps from `first_step` on, without end. Closing it drops what is made ahead."""
        return self.in_order(make, ((recipe, step) for step in count(first_step)))

    def in_order(self, function: Callable[..., ReadyEvent], calls: Iterator[tuple[Any, ...]]) -> Iterator[ReadyEvent]:
        """What the function gives for each of some arguments, made ahead by a bounded number."""
        if self._pool is None:
            for arguments in calls:
                yield function(*arguments)
            return
        waiting: deque[Future[ReadyEvent]] = deque()
        try:
            while True:
                for arguments in islice(calls, AHEAD * self.workers - len(waiting)):
                    waiting.append(self._pool.submit(function, *arguments))
                if not waiting:
                    return
                begun = time.perf_counter()
                batch = waiting.popleft().result()
                self.waited += time.perf_counter() - begun
                yield batch
        finally:
            for future in waiting:
                future.cancel()

    def validation(self, recipe: Recipe, images: int) -> Callable[[], list[Packed]]:
        """Begin to make the images that validate a recipe's stage; the function returned waits for them."""
        recipe = replace(recipe, seed=VALIDATION_SEED, traced=False, hidden=0.0)
        each = images_at_once(recipe)
        ranges = [(first, min(first + each, images)) for first in range(0, images, each)]
        if self._pool is None:
            return lambda: [draw_and_pack(recipe, *some) for some in ranges]
        futures = [self._pool.submit(draw_and_pack, recipe, *some) for some in ranges]
        return lambda: [future.result() for future in futures]


def _quiet() -> None:
    """Each process has one core, and leaves signals to the parent."""
    import torch

    torch.set_num_threads(1)
    leave_signals_to_parent()
