"""The batches of a stage: fresh images, drawn, rendered and packed.

A batch is a function of settings, stage, step and the number of earlier runs, not of the number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from experiments.pathfinder.draw import draw
from experiments.pathfinder.owners import marker_counts
from experiments.pathfinder.parameters import parameters_of
from experiments.pathfinder.render import render
from experiments.pathfinder.rendering import drawn_rendering, rendered
from experiments.pathfinder.seeds import MOST_IMAGES, TEST_SEED, image_index, training_seed
from experiments.pathfinder.strokes import ORIGINAL, Stroked, stroked
from experiments.pathfinder.vectors import Vectors, collect
from experiments.pathx.config import Config, Stage, most_tokens
from experiments.pathx.data.masked_pixels import hide
from experiments.pathx.data.packing import Packed, blocks_needed, pack, stack
from experiments.pathx.data.released import folder_of_fold, image_of, rerendered, samples_of
from experiments.pathx.masks.relations import Relation

# Separate random numbers for an image's rendering, for the choice of its drawing, and of its strokes.
RENDERING_STREAM, DRAWING_STREAM, STROKES_STREAM = 1, 2, 3
WITH_FAINT_PIXELS = 0.2  # share of training images in random renderings that keep pixels below the floor
_FULLEST = 3300  # about the maximum number of tokens of images of 128 and 256 pixels
# About the minimum of the mean tokens per image of a batch: images of 32 pixels with 6 dashes have 284 and, without
# levels below 32, 130; images of 64 pixels 340.
_FEWEST, _FEWEST_BRIGHT = 256, {32: 112, 64: 256}


@dataclass(frozen=True)
class Recipe:
    number: int  # of the stage
    size: int
    contours: tuple[int, ...]  # used in turns; other images have the first
    seed: int
    background: str
    tokens: int
    layers: tuple[Relation, ...]
    block: int
    registers: int
    pixel_labels: bool  # whether batches have the marker counts of pixels
    hidden: float = 0.0  # share of hidden drawn pixels
    floor: int = 1  # lower levels are background, if background is dropped
    renderings: bool = False  # random renderings in training; otherwise all have this project's
    release: str | None = None  # folder of released images, used instead of fresh ones
    images: int | None = None  # number of distinct images of each length in training; None: all fresh
    strokes: tuple[str, ...] = (ORIGINAL,)  # of the images, drawn for each


def recipe_of(config: Config, number: int, earlier: int = 0) -> Recipe:
    stage: Stage = config.curriculum[number]
    return Recipe(
        number, stage.size, stage.contours, training_seed(config.seed, earlier), stage.background, stage.tokens,
        config.layers_of(stage), config.block, config.registers, config.auxiliary > 0 and not config.hidden,
        config.hidden, config.floor, config.renderings, config.release, stage.images, config.styles,
    )  # fmt: skip


def most_images(recipe: Recipe) -> int:
    if recipe.background == "keep":
        least = blocks_of_whole(recipe)
    else:
        fewest = _FEWEST if recipe.floor == 1 else _FEWEST_BRIGHT.get(recipe.size, _FEWEST)
        least = -(-fewest // recipe.block)
    return max(1, recipe.tokens // recipe.block // least)


def most_blocks(recipe: Recipe) -> int:
    if recipe.background == "keep":
        return blocks_of_whole(recipe)
    return -(-(recipe.registers + most_tokens(recipe.size)) // recipe.block)


def blocks_of_whole(recipe: Recipe) -> int:
    return recipe.size**2 // recipe.block + (recipe.registers > 0)


class Drawn(Protocol):
    @property
    def label(self) -> int: ...
    def image(self) -> NDArray[np.uint8]: ...
    def rendered(self, random: np.random.Generator) -> NDArray[np.uint8]: ...

    def counts(self) -> NDArray[np.uint8]: ...


@dataclass(frozen=True)
class Original:
    vectors: Vectors

    @property
    def label(self) -> int:
        return int(self.vectors.labels[0])

    def image(self) -> NDArray[np.uint8]:
        return render(self.vectors)[0]

    def rendered(self, random: np.random.Generator) -> NDArray[np.uint8]:
        return rendered(self.vectors, 0, drawn_rendering(random), random)

    def counts(self) -> NDArray[np.uint8]:
        return marker_counts(self.vectors)[0]


@dataclass(frozen=True)
class Other:
    made: Stroked

    @property
    def label(self) -> int:
        return self.made.label

    def image(self) -> NDArray[np.uint8]:
        return self.made.image

    def rendered(self, random: np.random.Generator) -> NDArray[np.uint8]:
        return rerendered(self.made.image, random)

    def counts(self) -> NDArray[np.uint8]:
        return self.made.counts


def drawn(size: int, contour: int, seed: int, index: int) -> Vectors:
    parameters = parameters_of(size, contour)
    return collect(parameters, seed, [draw(parameters, seed, index)])


def make(recipe: Recipe, step: int) -> Packed:
    """Of a step (from 0): images in index order, up to the first that does not fit."""
    blocks = recipe.tokens // recipe.block
    keeps = recipe.background == "keep"
    images, labels, pixel_labels = [], [], []
    left, most = blocks, most_images(recipe)
    while len(images) < most:
        contour = recipe.contours[len(images) % len(recipe.contours)]
        index = image_index(recipe.number, step, len(images))
        if recipe.release is not None:
            image, label = released_image(recipe, contour, index)
        else:
            drawing = drawing_of(recipe, contour, drawing_index(recipe, index))
            image, label = training_image(recipe, drawing, index), drawing.label
        left -= blocks_of_whole(recipe) if keeps else blocks_needed(image, recipe.registers, recipe.block)
        if left < 0:
            break
        images.append(image)
        labels.append(label)
        if recipe.pixel_labels:
            pixel_labels.append(drawing.counts())
    common = {
        "block": recipe.block,
        "registers": recipe.registers,
        "pixel_labels": pixel_labels if recipe.pixel_labels else None,
    }
    if keeps:
        packed = stack(images, labels, recipe.layers, **common)
    else:
        packed = pack(images, labels, recipe.layers, blocks=blocks, **common)
    if not recipe.hidden:
        return packed
    return hide(packed, recipe.hidden, np.random.default_rng([recipe.seed, image_index(recipe.number, step, 0)]))


def drawing_index(recipe: Recipe, index: int) -> int:
    if recipe.images is None:
        return index
    chosen = int(np.random.default_rng([recipe.seed, index, DRAWING_STREAM]).integers(recipe.images))
    return image_index(recipe.number, *divmod(chosen, MOST_IMAGES))


def drawing_of(recipe: Recipe, contour: int, index: int) -> Drawn:
    style = recipe.strokes[0]
    if len(recipe.strokes) > 1:
        random = np.random.default_rng([recipe.seed, index, STROKES_STREAM])
        style = recipe.strokes[random.integers(len(recipe.strokes))]
    if style == ORIGINAL:
        return Original(drawn(recipe.size, contour, recipe.seed, index))
    return Other(stroked(style, recipe.size, contour, recipe.seed, index))


def training_image(recipe: Recipe, drawing: Drawn, index: int) -> NDArray[np.uint8]:
    if not recipe.renderings:
        return without_background(drawing.image(), recipe)
    random = np.random.default_rng([recipe.seed, index, RENDERING_STREAM])
    return faint_or_not(recipe, drawing.rendered(random), random)


def released_image(recipe: Recipe, contour: int, index: int) -> tuple[NDArray[np.uint8], int]:
    samples = samples_of(folder_of_fold(Path(recipe.release or ""), recipe.size, contour), "training")
    random = np.random.default_rng([recipe.seed, index, RENDERING_STREAM])
    sample = samples[random.integers(len(samples))]
    image = image_of(sample, recipe.size)
    if not recipe.renderings:
        return without_background(image, recipe), sample.label
    return faint_or_not(recipe, rerendered(image, random), random), sample.label


def faint_or_not(recipe: Recipe, image: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    """Without its background or, sometimes, with its faint pixels.

    With noise everywhere they would be too many tokens.
    """
    keeps = random.random() < WITH_FAINT_PIXELS and np.count_nonzero(image) <= most_tokens(recipe.size)
    return image if keeps else without_background(image, recipe)


def without_background(image: NDArray[np.uint8], recipe: Recipe) -> NDArray[np.uint8]:
    if recipe.background == "keep" or recipe.floor == 1:
        return image
    return np.where(image < recipe.floor, np.uint8(0), image)


def pack_vectors(recipe: Recipe, vectors: Vectors, first: int = 0, last: int | None = None) -> Packed:
    labels = vectors.labels[first:last].tolist()
    pixel_labels = list(marker_counts(vectors, first, last)) if recipe.pixel_labels else None
    return pack_images(recipe, list(render(vectors, first, last)), labels, pixel_labels)


def pack_images(
    recipe: Recipe,
    images: Sequence[NDArray[np.uint8]],
    labels: Sequence[int],
    pixel_labels: Sequence[NDArray[np.uint8]] | None = None,
) -> Packed:
    images = [without_background(image, recipe) for image in images]
    form = stack if recipe.background == "keep" else pack
    return form(
        images, labels, recipe.layers, block=recipe.block, registers=recipe.registers, pixel_labels=pixel_labels
    )


def draw_and_pack(recipe: Recipe, first: int, last: int) -> Packed:
    """Of the recipe's seed, rendered as in training; for a release, images of its validation split."""
    if recipe.release is not None:
        return pack_released(recipe, folder_of_fold(Path(recipe.release), recipe.size, recipe.contours[0]),
                             "validation", first, last)  # fmt: skip
    drawings = [drawing_of(recipe, recipe.contours[0], index) for index in range(first, last)]
    images = [training_image(recipe, one, index) for index, one in enumerate(drawings, first)]
    return pack_images(recipe, images, [one.label for one in drawings])


def pack_strokes(recipe: Recipe, style: str, first: int, last: int) -> Packed:
    """Test images first .. last - 1 of a style of strokes as one batch, as they are."""
    made = [stroked(style, recipe.size, recipe.contours[0], TEST_SEED, index) for index in range(first, last)]
    return pack_images(recipe, [each.image for each in made], [each.label for each in made])


def pack_released(recipe: Recipe, place: Path, split: str, first: int, last: int) -> Packed:
    chosen = samples_of(place, split)[first:last]
    return pack_images(recipe, [image_of(sample, recipe.size) for sample in chosen], [each.label for each in chosen])


def images_at_once(recipe: Recipe) -> int:
    most = recipe.size**2 if recipe.background == "keep" else min(recipe.size**2, _FULLEST)
    return max(1, recipe.tokens // most)


def batches_of(recipe: Recipe, images: int) -> list[tuple[int, int]]:
    each = images_at_once(recipe)
    return [(first, min(first + each, images)) for first in range(0, images, each)]
