"""Orders of the tokens of a grid (image, video): row-major, by tiles, Morton, Hilbert, by residue.

An order is a permutation, int64 `[N]`: token t of the new sequence is token `order[t]` of the grid in row-major order.
The drawings show, at each place of a grid, the place's number in the new sequence.

The result of attention does not depend on the order of the tokens, as long as q, k, v and the mask have the same order;
its cost does. In row-major order a block of tokens is a piece of a line, and its window reaches into blocks of many
lines. If a block is a compact piece of the image, the same scores lie in fewer tiles, so less is computed. The example
prints the live tiles, and the share of their scores that is live, of a window of 13 x 13 on an image of 128 x 128
tokens. In each case 1.03 % of all scores are live:

>>> from sparseflash.masks import neighborhood
>>> image = (128, 128)
>>> for block, tile in (128, (8, 16)), (64, (8, 8)):
...     orders = {"row-major": None, "tiles": tiles(image, tile), "Morton": morton(image), "Hilbert": hilbert(image)}
...     for name, order in orders.items():
...         mask = neighborhood(image, window=13, order=order, block=block)
...         live = len(mask.indices)
...         share = mask.density * 128**4 / (live * block**2)
...         print(f"block {block:3}  {name:9}  {live:5} tiles  {share:4.0%} live")
block 128  row-major   1664 tiles   10% live
block 128  tiles       1012 tiles   17% live
block 128  Morton      1012 tiles   17% live
block 128  Hilbert      966 tiles   17% live
block  64  row-major   6656 tiles   10% live
block  64  tiles       2116 tiles   32% live
block  64  Morton      2116 tiles   32% live
block  64  Hilbert     2116 tiles   32% live

The patterns over grids take an order and build the mask in it. A model permutes its tokens once at its input and back
at its output. Attention in the order of tiles gives the same result as in row-major order, reordered:

>>> from sparseflash import attention
>>> order = tiles((8, 8), 4)
>>> x = torch.randn(3, 1, 2, 64, 16, dtype=torch.float64)  # q, k, v: [B, H, N, D]
>>> out = attention(*x, neighborhood((8, 8), window=3, block=16))
>>> permuted = attention(*x[:, :, :, order], neighborhood((8, 8), window=3, order=order, block=16))
>>> torch.allclose(permuted, out[:, :, order]) and torch.allclose(permuted[:, :, inverse(order)], out)
True
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparseflash.blockmask.arguments import Integers, known_integers
from sparseflash.blockmask.threads import on_one_thread
from sparseflash.masks.tiling.grid import checked_order, coordinates, grid_shape, per_axis, strides


@on_one_thread
def row_major(shape: Sequence[int]) -> Tensor:
    """The default order of the patterns over grids, with the last axis fastest: `0, 1, ..., N - 1`.

    >>> row_major((2, 3)).tolist()
    [0, 1, 2, 3, 4, 5]
    """
    sides = grid_shape(shape)
    return torch.arange(len(coordinates(sides)), device="cpu")


@on_one_thread
def tiles(shape: Sequence[int], tile: int | Sequence[int]) -> Tensor:
    """Tile after tile. The tiles are in row-major order, and so are the tokens of each tile.

    >>> tiles((4, 4), 2).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]

    Args:
        shape: side lengths of the grid in tokens.
        tile: its side in tokens, one number or one for each axis.

    If the tile does not divide a side of the grid, the last tiles are smaller, and tiles of `block` tokens are then no
    longer aligned with the blocks of a mask.

        4 x 4 in tiles of 2       0  1  4  5
                                  2  3  6  7
                                  8  9 12 13
                                 10 11 14 15
    """
    sides = grid_shape(shape)
    sizes = per_axis(tile, sides, "tile", "tokens")
    places = coordinates(sides).long()
    jumps = strides(tuple(-(-side // size) for side, size in zip(sides, sizes, strict=True)))
    number = (places // places.new_tensor(sizes) * places.new_tensor(jumps)).sum(1)
    return torch.argsort(number, stable=True)  # within a tile, row-major as before


@on_one_thread
def morton(shape: Sequence[int]) -> Tensor:
    """The Z-order curve: tokens sorted by the interleaved bits of their coordinates, with the last axis lowest.

    >>> morton((3, 3)).tolist()
    [0, 1, 3, 4, 2, 5, 6, 7, 8]

    For any side lengths, it is the order of the tokens on the curve through the enclosing powers of two. Source:
    Morton, 1966.

        4 x 4       0  1  4  5
                    2  3  6  7
                    8  9 12 13
                   10 11 14 15
    """
    sides = grid_shape(shape)
    places = coordinates(sides).long()
    key, at = torch.zeros(len(places), dtype=torch.int64, device="cpu"), 0
    # Bits that no coordinate of an axis uses are left out: N tokens need few more than log2(N) bits, whatever the
    # shape.
    for bit in range(max(sides).bit_length()):
        for axis in reversed(range(len(sides))):
            if (sides[axis] - 1) >> bit:
                key |= (places[:, axis] >> bit & 1) << at
                at += 1
    return torch.argsort(key)


@on_one_thread
def hilbert(shape: Sequence[int]) -> Tensor:
    """The Hilbert curve: consecutive tokens are neighbours if both sides are the same power of two.

    >>> hilbert((4, 4)).tolist()
    [0, 4, 5, 1, 2, 3, 7, 6, 10, 11, 15, 14, 13, 9, 8, 12]

    For other side lengths, it is the order of the tokens on the curve through the enclosing cube of a power of two,
    which jumps where the curve leaves the grid. Any number of axes is allowed. Source: Skilling, Programming the
    Hilbert curve, 2004.

        4 x 4       0  3  4  5
                    1  2  7  6
                   14 13  8  9
                   15 12 11 10

    Raises ValueError if the curve through the enclosing cube has more than 2^62 places.
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


@on_one_thread
def residues(shape: Sequence[int], step: int | Sequence[int]) -> Tensor:
    """Groups of tokens whose coordinates have the same remainders modulo `step`; row-major order within a group.

    >>> residues((4, 4), 2).tolist()
    [0, 2, 8, 10, 1, 3, 9, 11, 4, 6, 12, 14, 5, 7, 13, 15]

    Use it for dilated patterns: in this order a dilated window is a plain window on each of the smaller grids.
    """
    sides = grid_shape(shape)
    sizes = per_axis(step, sides, "step", "tokens")
    places = coordinates(sides).long()
    number = (places % places.new_tensor(sizes) * places.new_tensor(strides(sizes))).sum(1)
    return torch.argsort(number, stable=True)


@on_one_thread
def inverse(order: Integers) -> Tensor:
    """The inverse permutation: `inverse(order)[order[t]] == t`, so `x[:, :, order][:, :, inverse(order)]` is x.

    >>> inverse(torch.tensor([2, 0, 1])).tolist()
    [1, 2, 0]

    `order`: an integer tensor, array or list `[N]`. Raises TypeError or ValueError if it is no permutation.
    """
    order = known_integers(order, "order", torch.device("cpu"))
    if order.ndim != 1:
        raise ValueError(f"order must have shape [N]; got {list(order.shape)}.")
    checked = checked_order(order, len(order))
    assert checked is not None
    return torch.empty_like(checked).scatter_(0, checked, torch.arange(len(checked), device="cpu")).to(order.device)
