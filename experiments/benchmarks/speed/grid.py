"""The rule of neighbourhood attention on an image whose tokens are ordered tile by tile.

One tile of the image is one mask block. The rule uses only `//`, `%`, comparisons, `&` and `|`, so it also runs inside
the kernels of FlexAttention and FlashAttention-4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

WINDOW = 33  # tokens
TILES = {16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16)}  # rows and columns of a tile


class Grid(NamedTuple):
    """In tokens; the window of a query."""

    height: int
    width: int
    tile_height: int
    tile_width: int
    window_height: int
    window_width: int

    def live(self, q: Any, k: Any) -> Any:
        """For positions in the order of tiles."""
        q_row, q_col = self._place(q)
        k_row, k_col = self._place(k)
        return near(q_row, k_row, self.height, self.window_height) & near(q_col, k_col, self.width, self.window_width)

    def _place(self, token: Any) -> tuple[Any, Any]:
        tokens, across = self.tile_height * self.tile_width, self.width // self.tile_width
        tile, inside = token // tokens, token % tokens
        return (
            tile // across * self.tile_height + inside // self.tile_width,
            tile % across * self.tile_width + inside % self.tile_width,
        )


def near(q: Any, k: Any, side: int, window: int) -> Any:
    # s <= k < s + window with s = min(max(q - window // 2, 0), side - window), without minima.
    first = q - window // 2
    return ((k >= first) | (k >= side - window)) & ((k < first + window) | (k < window))


def grid(length: int, block: int) -> Grid:
    """The most square image in whole tiles of `block` tokens."""
    tile_height, tile_width = TILES[block]
    count = length // block
    shapes = [(rows * tile_height, count // rows * tile_width) for rows in range(1, count + 1) if count % rows == 0]
    height, width = min(shapes, key=lambda shape: abs(shape[0] - shape[1]))
    return Grid(height, width, tile_height, tile_width, min(WINDOW, height), min(WINDOW, width))
