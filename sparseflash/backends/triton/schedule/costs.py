"""The cost model of the schedule: when items are cut into chunks, and which tiling is the cheapest.

The constants were measured on an H100, and are used on all GPUs.
"""

from __future__ import annotations

from typing import NamedTuple


class SplitRule(NamedTuple):
    """When items are cut into chunks (split-K, see schedule/splits.py). Lengths of items are in tiles of the mask.

    Programs start longest first. So with `mean = sum of lengths / slots` the last program ends at about `max(mean,
    longest)`, and cutting can save at most a factor of `longest / mean`. Slots are the programs that run at a time, by
    `resident_programs`. A row's bits must not depend on the number of heads and batch elements. So the model assumes
    that a constant number of `heads` shares the slots: with fewer heads, rows are cut less than would be best, with
    more heads, more.

    A chunk costs about half a tile, to write and read its partial result. The merge is one more kernel of a few
    microseconds, about two tiles. So no chunk is shorter than 16 tiles.

    If all lists have similar lengths (dense, causal) and there are only too few for all slots, cutting saves less than
    the model predicts, because a program that has an SM to itself runs faster than one of two. In this case items are
    cut only if most of the slots would be idle, as in attention of a few queries to very many keys.

    Examples with 16,384 tokens: the number of chunks of the longest row, and the cost of the chunks of all rows, at
    most, as a share of the work

        2 global rows and columns, window 3, 3 random, blocks of 128, D = 128    4 chunks   0.3 %
                                                       blocks of 64, D = 64      7 chunks   0.3 %
        causal, dense                                                            not cut
        1,024 queries that see 65,536 keys, D = 128                              5 chunks   0.5 %
        1 query that sees 65,536 keys, D = 64                                   64 chunks   6.2 %
    """

    multiprocessors: int = 132  # of an H100; a constant, so that results on all GPUs depend only on the tile sizes
    heads: int = 8
    fewest: int = 2048  # the minimum of tokens per chunk, or
    fewest_tiles: int = 16  # this many times the tokens that a program holds, if that is less
    far: float = 4.0  # an item longer than this many times the mean is an outlier
    worth: float = 1.5  # items are cut only if the longest has this many times the length of a chunk and is an outlier,
    worth_alike: float = 4.0  # or else this many times

    def shortest(self, held: int) -> int:
        """The length of the shortest chunk, in tokens."""
        return min(self.fewest, self.fewest_tiles * held)

    def longest_whole(self, held: int) -> float:
        """The length in tokens of the longest items that are never cut if all have similar lengths."""
        return self.worth_alike * self.shortest(held)


SPLITS = SplitRule()

# Costs of kernels in other tilings, in units of the products of 64 x 64 scores on tensor cores.
#   loading           64 contiguous streamed tokens; most of this overlaps with products
#   loading_gathered  64 tokens gathered from small blocks; every thread computes addresses
#   step              every step of four or more warps; fewer warps wait as long, but more programs can be resident
#   program           every program: to find its work, load the tile it holds and write its results
#   worth             the cost of another tiling must be at most this share of the mask's own, because the tiling has
#                     to be made and has more partial tiles
# The constants for half precision are based on timings of an H100 (four kinds of masks in blocks of 16 to 128, bf16, 64
# and 128 channels, three kernels). They are close to the fits of the benchmark of blocks to
# experiments/results/speed/blocks-h100-49b1c4b (in git's history, at caba0b23), but adjusted for the best choices: for
# 23 masks and kernels the chosen tiling takes 2 % longer than the fastest measured one on average, and at most 25 %.
# The predicted times are off by a quarter. Full fp32 multiplies six times and loads three times as much; its constants
# are estimates.
TILE_COSTS = {
    "half": {"loading": 0.1, "loading_gathered": 0.6, "step": 0.45, "program": 1.9, "worth": 0.9},
    "fp32": {"loading": 0.05, "loading_gathered": 0.3, "step": 0.1, "program": 0.4, "worth": 0.9},
}

# Other tilings take time to count and to make, once per mask. They are tried only if a head has this many products.
PRODUCTS_FOR_TILINGS = 20_000_000

HOST_PLAN_ITEMS = 4096  # a plan with at most this many work items is made on the host
