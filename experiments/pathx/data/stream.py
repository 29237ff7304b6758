"""Batches made by other processes ahead of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from itertools import count
from pathlib import Path

from experiments.pathfinder.seeds import VALIDATION_SEED
from experiments.pathx.data.batches import Recipe, batches_of, draw_and_pack, make
from experiments.pathx.data.packing import Packed
from experiments.pathx.data.released import folder_of_fold, samples_of
from experiments.training.prefetch import Prefetcher


class Stream(Prefetcher):
    def __enter__(self) -> Stream:
        return self

    def batches(self, recipe: Recipe, first_step: int) -> Generator[Packed, None, None]:
        return self.in_order(make, ((recipe, step) for step in count(first_step)))

    def validation(self, recipe: Recipe, images: int) -> Callable[[], list[Packed]]:
        recipe = replace(recipe, seed=VALIDATION_SEED, pixel_labels=False, hidden=0.0)
        if recipe.release is not None:
            place = folder_of_fold(Path(recipe.release), recipe.size, recipe.contours[0])
            images = min(images, len(samples_of(place, "validation")))
        return self.begin_all(draw_and_pack, [(recipe, first, last) for first, last in batches_of(recipe, images)])
