from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from experiments.benchmarks.patterns.entries.image import (
    places,
    places_by_residue,
    places_in_tiles,
    places_on_curve,
    sides,
    volume,
)
from experiments.benchmarks.patterns.entries.pattern import MEDIUM, Live, Pattern
from sparseflash import BlockMask, masks

# axis(x, y, side): the rule on one axis, for a query at x and a key at y.
Axis = Callable[[Tensor, Tensor, int], Tensor]
WINDOW = 13


def on_grid(
    axis: Axis,
    places_of: Callable[[Tensor, Sequence[int], int], list[Tensor]] = lambda x, shape, block: places(x, shape),
) -> Live:
    def live(h: Tensor, q: Tensor, k: Tensor, n: int, block: int) -> Tensor:
        shape = sides(n)
        found = (q >= 0) & (k >= 0)
        for x, y, side in zip(places_of(q, shape, block), places_of(k, shape, block), shape):
            found = found & axis(x, y, side)
        return found

    return live


def shifted(window: int) -> Axis:
    def axis(x: Tensor, y: Tensor, side: int) -> Tensor:
        start = (x - window // 2).clamp(0, side - window)
        return (y >= start) & (y < start + window)

    return axis


def in_groups(window: int, stride: int) -> Axis:
    def axis(x: Tensor, y: Tensor, side: int) -> Tensor:
        leader = (x // stride * stride + stride // 2).clamp(max=side - 1)
        return shifted(window)(leader, y, side)

    return axis


def with_gaps(window: int, dilation: int) -> Axis:
    def axis(x: Tensor, y: Tensor, side: int) -> Tensor:
        near = shifted(window)(x // dilation, y // dilation, side // dilation)
        return near & (x % dilation == y % dilation)

    return axis


def video_window(q: Tensor, k: Tensor, shape: Sequence[int]) -> Tensor:
    found = (q >= 0) & (k >= 0)
    for x, y, side, width in zip(places(q, shape), places(k, shape), shape, (3, 7, 7)):
        found = found & shifted(width)(x, y, side)
    return found


def tiles_near(x: Tensor, y: Tensor, side: int, tile: int) -> Tensor:
    count = side // tile
    return shifted(min(3, count))(x // tile, y // tile, count)


def sliding(n: int, block: int, shape: Sequence[int], tile: Sequence[int]) -> BlockMask:
    window = [min(3 * length, side) for length, side in zip(tile, shape)]
    return masks.sliding_tiles(shape, window=window, tile=tile, order=masks.order.tiles(shape, tile), block=block)


def sliding_live(shape_of: Callable[[int], Sequence[int]]) -> Live:
    def live(h: Tensor, q: Tensor, k: Tensor, n: int, block: int) -> Tensor:
        shape, tile = shape_of(n), shape_of(block)
        found = (q >= 0) & (k >= 0)
        for x, y, side, length in zip(places_in_tiles(q, shape, tile), places_in_tiles(k, shape, tile), shape, tile):
            found = found & tiles_near(x, y, side, length)
        return found

    return live


def window(n: int, block: int, order: Callable[[Sequence[int]], Tensor] | None = None) -> BlockMask:
    shape = sides(n)
    return masks.neighborhood(shape, window=WINDOW, order=None if order is None else order(shape), block=block)


def cross(q: Tensor, k: Tensor, n: int, places_of: Callable[[Tensor, Sequence[int]], list[Tensor]]) -> Tensor:
    shape = sides(n)
    (row, column), (other_row, other_column) = places_of(q, shape), places_of(k, shape)
    return (row == other_row) | (column == other_column)


PATTERNS: list[Pattern] = [
    Pattern("neighborhood", "images and videos", "image: k in the 13 x 13 pixels nearest to q, moved inwards at edges",
        window, on_grid(shifted(WINDOW))),
    Pattern("neighborhood, tile order", "images and videos", "the same scores; tokens in the order of tiles of a block",
        lambda n, block: window(n, block, lambda shape: masks.order.tiles(shape, sides(block))),
        on_grid(shifted(WINDOW), places_of=lambda x, shape, block: places_in_tiles(x, shape, sides(block)))),
    Pattern("neighborhood, Morton order", "images and videos", "the same scores; tokens on the Z-order curve",
        lambda n, block: window(n, block, masks.order.morton),
        on_grid(shifted(WINDOW), places_of=lambda x, shape, block: places_on_curve(x, shape))),
    Pattern("neighborhood, Hilbert order", "images and videos", "the same scores; tokens on the Hilbert curve",
        lambda n, block: window(n, block, masks.order.hilbert)),
    Pattern("neighborhood, cropped", "images and videos", "rows and columns of q and k at most 6 apart",
        lambda n, block: masks.neighborhood(sides(n), window=WINDOW, edges="crop", block=block),
        on_grid(lambda x, y, side: (x - y).abs() <= WINDOW // 2)),
    Pattern("neighborhood, causal", "images and videos", "0 <= q - k < 13 in row and in column",
        lambda n, block: masks.neighborhood(sides(n), window=WINDOW, causal=True, block=block),
        on_grid(lambda x, y, side: (y <= x) & (x - y < WINDOW)), causal=True),
    Pattern("neighborhood, stride 4", "images and videos", "groups of 4 x 4 pixels share a window of 13 x 13",
        lambda n, block: masks.neighborhood(sides(n), window=WINDOW, stride=4, block=block),
        on_grid(in_groups(WINDOW, 4))),
    Pattern("neighborhood, dilation 2", "images and videos", "the 7 x 7 nearest of every second pixel each way",
        lambda n, block: masks.neighborhood(sides(n), window=7, dilation=2, block=block), on_grid(with_gaps(7, 2))),
    Pattern("neighborhood, video", "images and videos", "video: the 3 x 7 x 7 nearest, moved inwards at edges",
        lambda n, block: masks.neighborhood(volume(n), window=(3, 7, 7), block=block),
        lambda h, q, k, n, block: video_window(q, k, volume(n))),
    Pattern("sliding_tiles", "images and videos", "image, tile order: the 3 x 3 tiles about that of q",
        lambda n, block: sliding(n, block, sides(n), sides(block)), sliding_live(sides)),
    Pattern("sliding_tiles, video", "images and videos", "video, tile order: the 3 x 3 x 3 tiles about that of q",
        lambda n, block: sliding(n, block, volume(n), volume(block)), sliding_live(volume)),
    Pattern("swin", "images and videos", "q and k in one window of 8 x 8 pixels",
        lambda n, block: masks.swin(sides(n), window=8, block=block), on_grid(lambda x, y, side: x // 8 == y // 8)),
    Pattern("swin, shifted", "images and videos", "the same, cut at 4, 12, 20, ...; the reach is of both, in turns",
        lambda n, block: masks.swin(sides(n), window=8, shift=4, block=block),
        on_grid(lambda x, y, side: (x + 4) // 8 == (y + 4) // 8),
        stack=lambda n, block: [masks.swin(sides(n), window=8, shift=shift, block=block) for shift in (0, 4)]),
    Pattern("swin, tile order", "images and videos", "windows of 8 x 8 again; tokens in their order",
        lambda n, block: masks.swin(sides(n), window=8, order=masks.order.tiles(sides(n), 8), block=block),
        lambda h, q, k, n, block: q // 64 == k // 64),
    Pattern("axial", "images and videos", "q and k in one row or in one column",
        lambda n, block: masks.axial(sides(n), block=block), lambda h, q, k, n, block: cross(q, k, n, places),
        tokens=MEDIUM),
    Pattern("axial, tile order", "images and videos", "the same scores; tokens in the order of tiles of a block",
        lambda n, block: masks.axial(sides(n), order=masks.order.tiles(sides(n), sides(block)), block=block),
        lambda h, q, k, n, block: cross(q, k, n, lambda x, shape: places_in_tiles(x, shape, sides(block))),
        tokens=MEDIUM),
    Pattern("dilated_grid", "images and videos", "4 divides the difference in row and in column",
        lambda n, block: masks.dilated_grid(sides(n), dilation=4, block=block),
        on_grid(lambda x, y, side: (x - y) % 4 == 0), tokens=MEDIUM),
    Pattern("dilated_grid, residue order", "images and videos", "the same scores; tokens of the same residues together",
        lambda n, block: masks.dilated_grid(sides(n), dilation=4, order=masks.order.residues(sides(n), 4), block=block),
        on_grid(lambda x, y, side: (x - y) % 4 == 0, places_of=lambda x, shape, block: places_by_residue(x, shape, 4)),
        tokens=MEDIUM),
]  # fmt: skip
