"""Orders of the tokens of a grid: row-major, by tiles, Morton (Z), Hilbert, by residue.

WRITE
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparseflash.masks.grid import checked_order, coordinates, grid_shape, per_axis, strides


def row_major(shape: Sequence[int]) -> Tensor:
    """The tokens as the patterns over grids take them by default, the last axis fastest: `0, 1, ..., N - 1`.

    >>> row_major((2, 3)).tolist()
    [0, 1, 2, 3, 4, 5]
    """
    sides = grid_shape(shape)
    return torch.arange(len(coordinates(sides)))


def tiles(shape: Sequence[int], tile: int | Sequence[int]) -> Tensor:
    """Tile after tile, both the tiles and the tokens of each in row-major order.

    `tile`: tokens a side, one number or one for each axis. Where a side of the grid is no multiple of it, the last
    tiles are smaller; then tiles of `block` tokens do not stay aligned with the blocks of a mask.

        4 x 4 in tiles of 2       0  1  4  5
                                  2  3  6  7
                                  8  9 12 13
                                 10 11 14 15

    >>> tiles((4, 4), 2).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    """
    sides = grid_shape(shape)
    size = torch.tensor(per_axis(tile, sides, "tile", "tokens"))
    places = coordinates(sides).long()
    number = (places // size * torch.tensor(strides(tuple(-(-sides[a] // int(size[a])) for a in range(len(sides)))))).sum(1)
    return torch.argsort(number, stable=True)  # within a tile, row-major as before


def morton(shape: Sequence[int]) -> Tensor:
    """The Z-order curve: tokens by the bits of their coordinates in turns, the last axis lowest.

    On any side lengths: the order of the tokens on the curve through the enclosing powers of two. Source: Morton, 1966.

        4 x 4       0  1  4  5
                    2  3  6  7
                    8  9 12 13
                   10 11 14 15

    >>> morton((3, 3)).tolist()
    [0, 1, 3, 4, 2, 5, 6, 7, 8]
    """
    sides = grid_shape(shape)
    places = coordinates(sides).long()
    key, at = torch.zeros(len(places), dtype=torch.int64), 0
    # A bit that no coordinate of an axis has is left out: N tokens need few more than log2(N) bits, whatever the shape.
    for bit in range(max(sides).bit_length()):
        for axis in reversed(range(len(sides))):
            if (sides[axis] - 1) >> bit:
                key |= (places[:, axis] >> bit & 1) << at
                at += 1
    return torch.argsort(key)


def hilbert(shape: Sequence[int]) -> Tensor:
    """The Hilbert curve: consecutive tokens are neighbours, where both sides are the same power of two.

    On other side lengths: the order of the tokens on the curve through the enclosing cube of a power of two; it then
    jumps where the curve leaves the grid. Any number of axes. Source: Skilling, Programming the Hilbert curve, 2004.

        4 x 4       0  1 14 15
                    3  2 13 12
                    4  7  8 11
                    5  6  9 10

    Raises ValueError if the curve through the enclosing cube has more than 2^62 places.

    >>> hilbert((4, 4)).tolist()
    [0, 1, 5, 4, 8, 12, 13, 9, 10, 14, 15, 11, 7, 6, 2, 3]
    """
    sides = grid_shape(shape)
    bits, axes = (max(sides) - 1).bit_length(), len(sides)
    if bits * axes > 62:
        raise ValueError(f"shape must lie in a cube of at most 2^62 tokens for a Hilbert curve; got {sides}.")
    x = list(coordinates(sides).long().unbind(1))
    # Skilling's AxesToTranspose: from the coordinates to the index on the curve, its bits spread over the axes.
    for bit in reversed(range(1, bits)):
        low = (1 << bit) - 1
        for axis in range(axes):
            swap = torch.where((x[axis] >> bit & 1).bool(), 0, (x[0] ^ x[axis]) & low)
            invert = torch.where((x[axis] >> bit & 1).bool(), low, 0)
            x[axis] = x[axis] ^ swap
            x[0] = x[0] ^ swap ^ invert
    for axis in range(1, axes):
        x[axis] = x[axis] ^ x[axis - 1]
    flips = torch.zeros_like(x[0])
    for bit in reversed(range(1, bits)):
        flips = torch.where((x[-1] >> bit & 1).bool(), flips ^ ((1 << bit) - 1), flips)
    key = torch.zeros_like(x[0])
    for bit in reversed(range(bits)):
        for axis in range(axes):
            key = key << 1 | ((x[axis] ^ flips) >> bit & 1)
    return torch.argsort(key)


def residues(shape: Sequence[int], step: int | Sequence[int]) -> Tensor:
    """Tokens whose coordinates leave the same remainders after division by `step` together; row-major among them.

    What a dilated pattern asks for: in this order a dilated window is a plain one on each of the smaller grids.

    >>> residues((4, 4), 2).tolist()
    [0, 2, 8, 10, 1, 3, 9, 11, 4, 6, 12, 14, 5, 7, 13, 15]
    """
    sides = grid_shape(shape)
    sizes = per_axis(step, sides, "step", "tokens")
    number = (coordinates(sides).long() % torch.tensor(sizes) * torch.tensor(strides(sizes))).sum(1)
    return torch.argsort(number, stable=True)


def inverse(order: Tensor) -> Tensor:
    """Where each token went: `inverse(order)[order[t]] == t`. `x[:, :, order][:, :, inverse(order)]` is x.

    Raises TypeError or ValueError if `order` is no permutation.

    >>> inverse(torch.tensor([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    if not isinstance(order, Tensor):
        raise TypeError(f"order must be an integer tensor; got {type(order).__name__}.")
    if order.ndim != 1:
        raise ValueError(f"order must have shape [N]; got {list(order.shape)}.")
    checked = checked_order(order, len(order))
    assert checked is not None
    return torch.empty_like(checked).scatter_(0, checked, torch.arange(len(checked))).to(order.device)
