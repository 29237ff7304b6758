"""Images as the tokens of one batch, in one of two layouts with one data type:

- **packed**: only drawn (not black) pixels are tokens. All images are concatenated into one sequence of fixed length,
  each beginning with a new block, so every step has the same shape.
- **whole**: all pixels are tokens, with one image in each row. The masks are the same for all images and steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.pathx.masks.live_tiles import TokenBlocks, live_tiles
from experiments.pathx.masks.orders import BASE, pixels_in
from experiments.pathx.masks.relations import Relation
from experiments.training.steps import BatchSize

LEVELS = 256  # token LEVELS + r is register r
PADDING = -1
BACKGROUNDS = ("drop", "keep")


class TileList(NamedTuple):
    """The tiles of a packed batch under one relation, row by row.

    indptr  int32 [M + 1]   the tiles of block row i are indptr[i] : indptr[i + 1]
    indices int32 [nnz]     their block columns
    tile    int32 [nnz]     0: all scores are live; t > 0: it is the t-th of `partial`
    partial int32 [T, 2]    block row and column of the tiles whose bits must be computed
    """

    indptr: NDArray[np.int32]
    indices: NDArray[np.int32]
    tile: NDArray[np.int32]
    partial: NDArray[np.int32]


@dataclass(frozen=True)
class Packed:
    """I images as tokens [B, N], in blocks of `block` tokens; M = B * N / block blocks in all.

    ids      int16 [B, N]      grey level, LEVELS + r for register r, or PADDING
    y, x     int16 [1, N]      the pixel's place; 0 for tokens that are not pixels
    labels   uint8 [I]         1: connected
    blocks   int32 [I, K]      the blocks of every image; M if an image has fewer
    orders   name: int32 [N]   token t in that order is token orders[name][t] of the sequence
    tiles    name: TileList    for each relation in the packed layout; empty in the whole layout
    pixel_labels  uint8 [B, N]  markers on the curve through the pixel (pathfinder/owners.py), or None
    tokens   int               the number of live tokens
    side     int               pixels along a side of the images
    """

    ids: NDArray[np.int16]
    y: NDArray[np.int16]
    x: NDArray[np.int16]
    labels: NDArray[np.uint8]
    blocks: NDArray[np.int32]
    block: int
    tokens: int
    side: int
    orders: dict[str, NDArray[np.int32]] = field(default_factory=dict)
    tiles: dict[str, TileList] = field(default_factory=dict)
    pixel_labels: NDArray[np.uint8] | None = None

    @property
    def images(self) -> int:
        return len(self.labels)

    @property
    def size(self) -> BatchSize:
        return BatchSize(self.images, self.tokens, self.ids.size)


def blocks_needed(image: NDArray[np.uint8], registers: int, block: int) -> int:
    return -(-max(1, registers + int(np.count_nonzero(image))) // block)


def pack(
    images: Sequence[NDArray[np.uint8]],
    labels: Sequence[int],
    relations: Sequence[Relation],
    *,
    block: int,
    registers: int = 0,
    blocks: int | None = None,
    pixel_labels: Sequence[NDArray[np.uint8]] | None = None,
) -> Packed:
    """In one sequence of `blocks` blocks, by default as many as needed; raises ValueError if more are."""
    needs = [blocks_needed(image, registers, block) for image in images]
    total = sum(needs) if blocks is None else blocks
    if sum(needs) > total:
        raise ValueError(f"the images need {sum(needs)} blocks of {block} tokens; there are {total}")
    side, length = images[0].shape[0], total * block
    ids = np.full(length, PADDING, np.int16)
    y, x = np.zeros(length, np.int16), np.zeros(length, np.int16)
    marks = np.zeros(length, np.uint8) if pixel_labels is not None else None
    orders = {name: np.arange(length, dtype=np.int32) for name in {each.order for each in relations} - {BASE}}
    of_image = np.full((len(images), max(needs)), total, np.int32)
    found: dict[Relation, list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]]] = {}
    begin = 0
    place = np.empty(side * side, np.int64)
    for number, (image, need) in enumerate(zip(images, needs)):
        of_image[number, :need] = begin + np.arange(need)
        first = begin * block
        grey = image.reshape(-1)
        pixels = _live(grey, BASE, side)
        stop = registers + len(pixels)
        here = slice(first + registers, first + stop)
        ids[first : first + registers] = LEVELS + np.arange(registers)
        ids[here] = grey[pixels]
        y[here], x[here] = pixels // side, pixels % side
        if marks is not None and pixel_labels is not None:
            marks[here] = pixel_labels[number].reshape(-1)[pixels]
        place[pixels] = np.arange(registers, stop)
        in_order = {BASE: pixels}
        for name, order in orders.items():
            in_order[name] = _live(grey, name, side)
            order[here] = first + place[in_order[name]]
        for relation in dict.fromkeys(relations):
            blocks_of_image = _in_blocks(in_order[relation.order], side, registers, need, block)
            may, full = live_tiles(relation, blocks_of_image)
            rows, columns = np.nonzero(may)
            found.setdefault(relation, []).append((rows + begin, columns + begin, full[rows, columns]))
        begin += need
    return Packed(
        ids[None], y[None], x[None], np.array(labels, np.uint8), of_image, block, int((ids >= 0).sum()), side, orders,
        {relation.name: _joined(parts, total) for relation, parts in found.items()},
        None if marks is None else marks[None],
    )  # fmt: skip


def stack(
    images: Sequence[NDArray[np.uint8]],
    labels: Sequence[int],
    relations: Sequence[Relation],
    *,
    block: int,
    registers: int = 0,
    pixel_labels: Sequence[NDArray[np.uint8]] | None = None,
) -> Packed:
    """All pixels of images, uint8 [size, size], one image per row, after a block of registers."""
    side = images[0].shape[0]
    before = block if registers else 0
    length = before + side * side
    if length % block:
        raise ValueError(f"an image must have a multiple of {block} pixels to be stacked whole; got {side} x {side}")
    pixels = pixels_in(BASE, side)
    ids = np.full((len(images), length), PADDING, np.int16)
    ids[:, :registers] = LEVELS + np.arange(registers)
    ids[:, before:] = np.stack([image.reshape(-1)[pixels] for image in images])
    y, x = np.zeros((1, length), np.int16), np.zeros((1, length), np.int16)
    y[0, before:], x[0, before:] = pixels // side, pixels % side
    marks = None
    if pixel_labels is not None:
        marks = np.zeros((len(images), length), np.uint8)
        marks[:, before:] = np.stack([each.reshape(-1)[pixels] for each in pixel_labels])
    place = np.empty_like(pixels)
    place[pixels] = np.arange(len(pixels))
    orders = {}
    for name in {each.order for each in relations} - {BASE}:
        order = np.arange(length, dtype=np.int32)
        order[before:] = before + place[pixels_in(name, side)]
        orders[name] = order
    of_image = np.arange(len(images) * length // block, dtype=np.int32).reshape(len(images), -1)
    return Packed(
        ids, y, x, np.array(labels, np.uint8), of_image, block, int((ids >= 0).sum()), side, orders, {}, marks
    )  # fmt: skip


def _live(grey: NDArray[np.uint8], name: str, side: int) -> NDArray[np.int64]:
    pixels = pixels_in(name, side)
    return pixels[np.flatnonzero(grey[pixels])]


def _in_blocks(pixels: NDArray[np.int64], side: int, registers: int, count: int, block: int) -> TokenBlocks:
    y, x = np.full(count * block, -1, np.int64), np.full(count * block, -1, np.int64)
    here = slice(registers, registers + len(pixels))
    y[here], x[here] = pixels // side, pixels % side
    is_register = np.arange(count * block) < registers
    shape = (count, block)
    return TokenBlocks(y.reshape(shape), x.reshape(shape), (y >= 0).reshape(shape), is_register.reshape(shape))


def _joined(parts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]], total: int) -> TileList:
    rows, columns, full = (np.concatenate(column) for column in zip(*parts))
    indptr = np.searchsorted(rows, np.arange(total + 1)).astype(np.int32)
    tile = np.where(full, 0, np.cumsum(~full)).astype(np.int32)
    partial = np.stack([rows[~full], columns[~full]], axis=1).astype(np.int32)
    return TileList(indptr, columns.astype(np.int32), tile, partial)
