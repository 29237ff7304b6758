"""The live share of each cell of a coarse grid over a mask, from its list of live tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sparseflash.blockmask.arguments import checked_mask
from sparseflash.blockmask.stats import pattern_count
from sparseflash.blockmask.walks import walk

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask


@dataclass(frozen=True)
class Shares:
    """The live shares of R x C cells, from `shares`.

    >>> Shares(full=np.array([[0.5]]), partial=np.array([[0.25]]), step=(2, 2)).live.tolist()
    [[0.75]]

    - `full`     float64 `[R, C]`: live scores in full tiles, over all scores of the cell
    - `partial`  float64 `[R, C]`: live scores in partial tiles, over all scores of the cell
    - `step`     tiles per cell, down and across
    """

    full: NDArray[np.float64]
    partial: NDArray[np.float64]
    step: tuple[int, int]

    @property
    def live(self) -> NDArray[np.float64]:
        """Live scores over all scores of the cell, float64 `[R, C]`: 0 if empty, 1 if all are live."""
        return self.full + self.partial


def shares(
    mask: BlockMask, pattern: int = 0, rows: int = 512, cols: int = 512, *, lengths: tuple[int, int] | None = None
) -> Shares:
    """The exact live share of each cell of a grid of at most `rows` x `cols` cells.

    >>> from sparseflash import BlockMask
    >>> causal = BlockMask.from_function(lambda q, k: k <= q, 64, block=16)
    >>> shares(causal, rows=2, cols=4).live
    array([[0.765625, 0.265625, 0.      , 0.      ],
           [1.      , 1.      , 0.765625, 0.265625]])

    A cell is `step = (a, b)` tiles down and across, where a and b are the smallest powers of two that make the grid
    fit. No cell cuts a tile. The last row and column of cells may have fewer tiles. Time is proportional to the live
    tiles.

    Scores past `q_len` or `k_len` do not exist and are not counted, so a tile at a ragged end may have share 1. It
    still counts as partial, because it is stored with bits; so does a full tile that `lengths` cut.

    Args:
        rows, cols: the most cells down and across.
        pattern: the number of one of the mask's patterns.
        lengths: the numbers of live queries and keys; later tokens are padding, and dead. The mask's own lengths are
            not used: pass `mask.lengths[:, b]` for batch element b.
    """
    patterns = pattern_count(checked_mask(mask))
    if not 0 <= pattern < patterns:
        raise ValueError(f"pattern must lie in 0..{patterns - 1}; got {pattern}.")
    if rows < 1 or cols < 1:
        raise ValueError(f"rows and cols must be at least 1 cell; got {rows} and {cols}.")
    (row_blocks, col_blocks), step = mask.blocks, (_step(mask.blocks[0], rows), _step(mask.blocks[1], cols))
    tiles = walk(mask.to("cpu"), pattern, lengths)
    shape = (-(-row_blocks // step[0]), -(-col_blocks // step[1]))
    cell = (tiles.rows // step[0] * shape[1] + tiles.cols // step[1]).numpy()
    live = tiles.live().double().numpy()
    in_all = np.bincount(cell, live, minlength=shape[0] * shape[1]).reshape(shape)
    full = live * (live == mask.block_q * mask.block_k)
    in_full = np.bincount(cell, full, minlength=shape[0] * shape[1]).reshape(shape)
    area = np.outer(
        _tokens(shape[0], step[0] * mask.block_q, mask.q_len), _tokens(shape[1], step[1] * mask.block_k, mask.k_len)
    )
    return Shares(in_full / area, (in_all - in_full) / area, step)


def _step(blocks: int, most: int) -> int:
    return 1 << max(-(-blocks // most) - 1, 0).bit_length()


def _tokens(cells: int, size: int, length: int) -> NDArray[np.float64]:
    starts = np.arange(cells) * size
    return np.minimum(length - starts, size).astype(np.float64)
