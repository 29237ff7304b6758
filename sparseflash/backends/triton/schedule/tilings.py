"""The tilings of a mask: its own tiles, larger ones, or tiles gathered from several small blocks.

Tensor cores need at least 64 rows in the tile that a program holds, and loops at least 64 tokens per step. A mask of
smaller blocks can be run in other tiles with the same live scores, kept exact by bits:

- larger tiles unite blocks in both directions; dead scores between the blocks are computed in vain;
- gathered tiles unite blocks only over the tokens that a program holds; a step takes the next few live blocks of the
  list, wherever they are. No dead scores lie between these, but TMA cannot load them, so threads load with pointers.

Which is best depends on the positions of the blocks: in a window, larger tiles are nearly as full as small ones; a
random block is live in one row only. So each tiling's tiles are counted, and the cheapest is used.

Scores computed per live score, 16,384 tokens, 64 tokens held and 64 streamed, or 32 held:

    mask                                   blocks of    64 x 64    gathered    gathered, 32 held
    butterfly (i ^ j is a power of two)           16       3.27        3.27                 1.82
                                                  32       1.80        1.80                 1.00
    |i - j| <= 4                                  16       1.33        1.33                 1.33
                                                  32       1.11        1.11                 1.11
    2 global rows, columns; window 3; 3 random    16       6.61        2.40                 1.40
                                                  32       2.18        1.40                 1.00
    12.9 % random                                 16       6.88        3.30                 1.88
                                                  32       3.27        1.88                 1.01
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

# Costs of kernels in other tilings, used on all GPUs, in units of the products of 64 x 64 scores on tensor cores.
#   loading           64 contiguous streamed tokens; most of this overlaps with products
#   loading_gathered  64 tokens gathered from small blocks; every thread computes addresses
#   step              every step of four or more warps; fewer warps wait as long, but more programs can be resident
#   program           every program: to find its work, load the tile it holds and write its results
#   worth             the cost of another tiling must be at most this share of the mask's own, because the tiling has
#                     to be made and has more partial tiles
# The constants for half precision fit timings of an H100 (four kinds of masks in blocks of 16 to 128, bf16, 64 and 128
# channels, three kernels), adjusted for the best choices: for 23 masks and kernels the chosen tiling takes 2 % longer
# than the fastest measured one on average, and at most 25 %.
# The predicted times are off by a quarter. Full fp32 multiplies six times and loads three times as much; its constants
# are estimates.
TILE_COSTS = {
    "half": {"loading": 0.1, "loading_gathered": 0.6, "step": 0.45, "program": 1.9, "worth": 0.9},
    "fp32": {"loading": 0.05, "loading_gathered": 0.3, "step": 0.1, "program": 0.4, "worth": 0.9},
}

# Other tilings take time to count and to make, once per mask. They are tried only if a head has this many products.
PRODUCTS_FOR_TILINGS = 20_000_000

Tile = tuple[int, int]
Warps = Callable[[Tile, bool], int]


class Tiling(NamedTuple):
    """The tiles of a kernel's lists, in tokens: `held` by a program, and `streamed` per tile.

    Kernels over rows hold queries and stream keys; the kernel over columns holds keys and streams queries. If
    `gathered` is not 0, the streamed tokens of a tile come from blocks of `gathered` tokens, a divisor of `streamed`.
    """

    held: int
    streamed: int
    gathered: int = 0


class Cost(NamedTuple):
    """The cost of a kernel with a tiling, in units of the products of 64 x 64 scores; see `TILE_COSTS`."""

    loading: float  # of 64 contiguous streamed tokens
    loading_gathered: float  # of 64 gathered tokens
    step: float  # of four or more warps
    program: float
    worth: float  # another tiling must cost at most this share of the mask's own

    def of_step(self, held: int, streamed: int, *, gathered: bool = False, warps: int | None = None) -> float:
        """The cost of one step with a tile of `held` x `streamed` tokens. warps: None for the usual number.

        >>> round(HALF.of_step(64, 64), 2), round(HALF.of_step(64, 128), 2)
        (1.55, 2.65)
        >>> round(16 * HALF.of_step(16, 16), 2)  # the same number of scores as 64 x 64
        3.2
        """
        scores = held * streamed
        loading = self.loading_gathered if gathered else self.loading
        if warps is None:
            warps = usual_warps((held, streamed), gathered)
        return scores / 4096 + streamed / 64 * loading + self.step * min(1.0, warps / 4)

    def of_tiles(self, count: int, tiling: Tiling, tile: Tile, tokens: int, warps: int | None = None) -> float:
        held, streamed = step_of(tiling, tile)
        steps = count * (tiling.held // held) * (tiling.streamed // streamed)
        step = self.of_step(held, streamed, gathered=tiling.gathered > 0, warps=warps)
        return steps * step + self.program * tokens / held


def usual_warps(tile: Tile, gathered: bool) -> int:
    """The usual number of warps: one per 256 scores."""
    return tile[0] * tile[1] // 256


def step_of(tiling: Tiling, tile: Tile) -> Tile:
    """The tile of one step in a tiling, for a kernel that prefers `tile`.

    >>> step_of(Tiling(128, 16), (64, 128))
    (64, 16)
    """
    return min(tiling.held, tile[0]), min(tiling.streamed, tile[1])


HALF, FP32 = Cost(**TILE_COSTS["half"]), Cost(**TILE_COSTS["fp32"])


def candidates(block: Tile, whole: Tile, gathered: Tile) -> list[Tiling]:
    """The tilings worth counting for a mask in tiles of `block`, its own first.

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

    whole: the tile that the kernel prefers. gathered: the tile that it prefers if it gathers. Blocks are united up to
    these sizes, or to 64, so a mask of large blocks has only its own tiling.
    """
    held, streamed = block
    found = [Tiling(held, streamed)]
    found += [Tiling(a, b) for a in _united(held, whole[0], 64) for b in _united(streamed, whole[1], 64)]
    if streamed < gathered[1]:
        found += [Tiling(a, gathered[1], streamed) for a in (held, *_united(held, gathered[0], 32, 64))]
    return list(dict.fromkeys(found))


def _united(own: int, most: int, *sizes: int) -> list[int]:
    """The sizes, including `most`, that are larger than `own` and at most `most`; `[own]` if none is."""
    return sorted({size for size in (*sizes, most) if own < size <= most}) or [own]


def choose(
    tilings: Sequence[Tiling], count: Callable[[Tiling], int], tokens: int, whole: Tile, gathered: Tile, cost: Cost,
    warps: Warps,
) -> Tiling:  # fmt: skip
    """The cheapest tiling; the mask's own, which is the first, unless another is sufficiently cheaper.

    count: the number of tiles in all lists of a tiling. tokens: held by all programs together. whole, gathered: as in
    `candidates`.
    """
    prices = []
    for tiling in tilings:
        tile = gathered if tiling.gathered else whole
        step = warps(step_of(tiling, tile), tiling.gathered > 0)
        prices.append(cost.of_tiles(count(tiling), tiling, tile, tokens, step))
    return tilings[cheapest(prices, cost.worth)]


def cheapest(prices: Sequence[float], worth: float) -> int:
    """The index of the lowest price, if that is at most `worth` times the first; otherwise 0.

    >>> cheapest([10.0, 8.0, 9.0], 0.9), cheapest([10.0, 9.5], 0.9)
    (1, 0)
    """
    lowest = min(range(len(prices)), key=prices.__getitem__)
    return lowest if prices[lowest] <= worth * prices[0] else 0
