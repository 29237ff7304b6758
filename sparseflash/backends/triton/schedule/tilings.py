"""In which tiles a kernel walks a mask: those of the mask, larger ones, or ones gathered from several small blocks.

Tensor cores want at least 64 rows in the tile that a program holds, and loops want at least 64 tokens a step. A mask of
smaller blocks can be run in other tiles that have the same live scores, which the bits of the tiles keep exact:

- larger tiles unite blocks in both directions, and what is dead between them is multiplied in vain;
- gathered tiles unite blocks only over the tokens that a program holds; a step takes the next few live blocks of the
  list, wherever they lie. Nothing dead lies between those, but every thread has to load for itself.

Which is best depends on where the blocks lie. In a window larger tiles are nearly as full as small ones; a block drawn
at random is wanted by one row alone. So the tiles of each way are counted, and the cheapest is taken.

Scores multiplied for a live one, 16384 tokens, 64 tokens held and 64 streamed, or 32 held:

    mask                                   blocks of    64 x 64    gathered    gathered, 32 held
    butterfly (i ^ j is a power of two)           16       3.27        3.27                 1.82
                                                  32       1.80        1.80                 1.00
    |i - j| <= 4                                  16       1.33        1.33                 1.33
                                                  32       1.11        1.11                 1.11
    2 global rows, columns; window 3; 3 drawn     16       6.61        2.40                 1.40
                                                  32       2.18        1.40                 1.00
    12.9 % drawn                                  16       6.88        3.30                 1.88
                                                  32       3.27        1.88                 1.01
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sparseflash.backends.triton.configs import TILE_COSTS

Tile = tuple[int, int]  # tokens held, tokens streamed
Warps = Callable[[Tile, bool], int]  # that walk such tiles; whether they are gathered


class Tiling(NamedTuple):
    """The tiles of the lists that a kernel walks, in tokens: of those that a program holds, and of those it streams.

    Kernels over rows hold queries and stream keys; the one over columns holds keys and streams queries. If `gathered`
    is not 0, the streamed tokens of a tile come from blocks of so many tokens, which divides `streamed`.
    """

    held: int
    streamed: int
    gathered: int = 0


class Cost(NamedTuple):
    """What a kernel costs under a tiling, in units of the products of 64 x 64 scores; see `configs.TILE_COSTS`."""

    loading: float  # of 64 streamed tokens in one piece
    loading_gathered: float  # the same where they are gathered
    step: float  # of four warps, or more
    program: float
    worth: float  # another tiling than the mask's own must cost at most this part

    def of_step(self, held: int, streamed: int, *, gathered: bool = False, warps: int | None = None) -> float:
        """One step of a tile of `held` tokens over `streamed` ones. `warps`: None for the usual ones.

        >>> round(HALF.of_step(64, 64), 2), round(HALF.of_step(64, 128), 2)
        (1.55, 2.65)
        >>> round(16 * HALF.of_step(16, 16), 2)  # for as many scores
        3.2
        """
        scores = held * streamed
        loading = self.loading_gathered if gathered else self.loading
        if warps is None:
            warps = usual_warps((held, streamed), gathered)
        return scores / 4096 + streamed / 64 * loading + self.step * min(1.0, warps / 4)

    def of_tiles(self, count: int, tiling: Tiling, tile: Tile, tokens: int, warps: int | None = None) -> float:
        """A walk over `count` tiles of the lists, in steps of at most `tile`, by programs that hold all `tokens`."""
        held, streamed = step_of(tiling, tile)
        steps = count * (tiling.held // held) * (tiling.streamed // streamed)
        step = self.of_step(held, streamed, gathered=tiling.gathered > 0, warps=warps)
        return steps * step + self.program * tokens / held


def usual_warps(tile: Tile, gathered: bool) -> int:
    """One for 256 scores."""
    return tile[0] * tile[1] // 256


def step_of(tiling: Tiling, tile: Tile) -> Tile:
    """The tile of one step through tiles of that tiling, by a kernel that would take `tile`.

    >>> step_of(Tiling(128, 16), (64, 128))
    (64, 16)
    """
    return min(tiling.held, tile[0]), min(tiling.streamed, tile[1])


HALF, FP32 = Cost(**TILE_COSTS["half"]), Cost(**TILE_COSTS["fp32"])


def candidates(block: Tile, whole: Tile, gathered: Tile) -> list[Tiling]:
    """The tilings worth counting for a mask in tiles of `block`, its own first.

    `whole`: the tile that the kernel takes where nothing limits it; `gathered`: the same where it gathers. Blocks are
    united up to those, or to 64, and no further: a mask of large blocks has no other tiling than its own.

    >>> candidates((128, 128), (64, 128), (64, 64))
    [Tiling(held=128, streamed=128, gathered=0)]
    >>> for tiling in candidates((16, 16), (64, 128), (64, 64)):
    ...     print(*tiling)
    16 16 0
    64 64 0
    64 128 0
    16 64 16
    32 64 16
    64 64 16
    """
    held, streamed = block
    found = [Tiling(held, streamed)]
    found += [Tiling(a, b) for a in _united(held, whole[0], 64) for b in _united(streamed, whole[1], 64)]
    if streamed < gathered[1]:
        found += [Tiling(a, gathered[1], streamed) for a in (held, *_united(held, gathered[0], 32, 64))]
    return list(dict.fromkeys(found))


def _united(own: int, most: int, *sizes: int) -> list[int]:
    """Those of the sizes, and `most`, that lie between `own` and `most`; or else `own`."""
    return sorted({size for size in (*sizes, most) if own < size <= most}) or [own]


def choose(
    tilings: Sequence[Tiling], count: Callable[[Tiling], int], tokens: int, whole: Tile, gathered: Tile, cost: Cost,
    warps: Warps,
) -> Tiling:  # fmt: skip
    """The cheapest; but the first, which is the mask's own, unless that costs enough more.

    `count`: the tiles that the lists of a tiling hold together, for so many held `tokens`. `whole` and `gathered` as in
    `candidates`.
    """
    prices = []
    for tiling in tilings:
        tile = gathered if tiling.gathered else whole
        step = warps(step_of(tiling, tile), tiling.gathered > 0)
        prices.append(cost.of_tiles(count(tiling), tiling, tile, tokens, step))
    return tilings[cheapest(prices, cost.worth)]


def cheapest(prices: Sequence[float], worth: float) -> int:
    """The number of the lowest price, if it is at most `worth` times the first; or else 0.

    >>> cheapest([10.0, 8.0, 9.0], 0.9), cheapest([10.0, 9.5], 0.9)
    (1, 0)
    """
    lowest = min(range(len(prices)), key=prices.__getitem__)
    return lowest if prices[lowest] <= worth * prices[0] else 0
