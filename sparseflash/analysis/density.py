"""The share of the score matrix that a mask keeps, in scores and in tiles."""

from __future__ import annotations

from dataclasses import dataclass

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.walks import walks


@dataclass(frozen=True)
class Density:
    """Counts over all heads and batch elements of `mask.shape` (one of each if the mask is shared), and their shares.

    >>> found = density(BlockMask.from_function(lambda q, k: k <= q, 256, block=64))
    >>> found.live_tiles, found.full_tiles, found.partial_tiles
    (10, 6, 4)

    `scores`, `tiles`: of the whole matrix. A tile is live if any of its scores is. `full_tiles`: with all scores live;
    the kernel reads no bits for them. `partial_live_scores`: live scores in partial tiles.
    """

    scores: int
    live_scores: int
    tiles: int
    live_tiles: int
    full_tiles: int
    partial_live_scores: int
    scores_a_tile: int

    @property
    def partial_tiles(self) -> int:
        return self.live_tiles - self.full_tiles

    @property
    def score_share(self) -> float:
        """Live scores over all scores: `BlockMask.density`."""
        return self.live_scores / max(self.scores, 1)

    @property
    def tile_share(self) -> float:
        """Live tiles over all tiles: the share of dense attention's work that remains."""
        return self.live_tiles / max(self.tiles, 1)

    @property
    def partial_share(self) -> float:
        """Live scores of the partial tiles over all scores of these tiles; 1.0 without partial tiles."""
        return self.partial_live_scores / (self.partial_tiles * self.scores_a_tile) if self.partial_tiles else 1.0

    def __str__(self) -> str:
        return (
            f"{self.live_scores:,} of {self.scores:,} scores live ({100 * self.score_share:.3g} %), in "
            f"{self.live_tiles:,} of {self.tiles:,} tiles ({100 * self.tile_share:.3g} %): {self.full_tiles:,} full, "
            f"{self.partial_tiles:,} partial ({100 * self.partial_share:.3g} % live)"
        )


def density(mask: BlockMask) -> Density:
    """Live scores and live tiles of a mask: counts and shares. Padding (`lengths`) counts as dead.

    >>> mask = BlockMask.from_function(lambda q, k: k <= q, 256, block=64)
    >>> print(density(mask))
    32,896 of 65,536 scores live (50.2 %), in 10 of 16 tiles (62.5 %): 6 full, 4 partial (50.8 % live)
    >>> density(mask).tile_share
    0.625
    """
    live = tiles = full = partial = 0
    for walk in walks(mask):
        count, times = walk.live(), len(walk.users)
        live += times * int(count.sum())
        tiles += times * int((count > 0).sum())
        full += times * int((walk.kind == 0).sum())
        partial += times * int(count[walk.kind > 0].sum())
    (batch, heads, q_len, k_len), (row_blocks, col_blocks) = mask.shape, mask.blocks
    return Density(
        scores=batch * heads * q_len * k_len,
        live_scores=live,
        tiles=batch * heads * row_blocks * col_blocks,
        live_tiles=tiles,
        full_tiles=full,
        partial_live_scores=partial,
        scores_a_tile=mask.block_q * mask.block_k,
    )
