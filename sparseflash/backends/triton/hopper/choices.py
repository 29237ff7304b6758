"""Chooses the tiles of the Hopper backward, and describes the Hopper kernels for `explain`."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from sparseflash.backends.triton.family import KernelChoice
from sparseflash.backends.triton.hopper.configs import BLOCK, SMALL, may_be_small
from sparseflash.backends.triton.launcher import BoundLaunch
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.backends.triton.schedule.tilings import Tiling

# Tiles of 64 are taken for the backward where at most this share of the blocks of 64 in live tiles of 128 is live, by
# the head dims up to which it holds. Predicted, not measured: in tiles of 128 one pass has 5 products, in tiles of 64
# two kernels have 7 without additions to memory, at 460 (D = 128) and 370 TFLOP/s (D = 64) of the 5, for 550 and 460
# in full tiles of 128. The share is 0.94 under a window of 1,024 tokens, and 0.3 where 12 % of all blocks are live at
# random.
MOST_FILLED = {64: 0.80, 128: 0.84}


def backward_tile(plan: Plan, block: tuple[int, int], dims: tuple[int, int], kinds: Collection[str]) -> tuple[int, int]:
    """The tiles of the backward: SMALL or BLOCK. Counting live tiles synchronises with the device, once per mask."""
    if not may_be_small(block, dims, kinds):
        return BLOCK
    retiling = plan.lists.retiling
    if retiling is None:  # of a mask that is made at every step; the tiles are not known on the host
        return SMALL
    most = next(share for dim, share in MOST_FILLED.items() if max(dims) <= dim)
    live, united = plan.tiles_per_head * plan.lists.patterns, retiling.count(0, Tiling(*BLOCK))
    return SMALL if live <= most * united * (BLOCK[0] * BLOCK[1] // (SMALL[0] * SMALL[1])) else BLOCK


def reason_of_tile(
    tile: tuple[int, int], plan: Plan, block: tuple[int, int], dims: tuple[int, int], kinds: Collection[str]
) -> str:
    """Why the backward has these tiles, for `explain`."""
    if not may_be_small(block, dims, kinds) or plan.lists.retiling is None:
        return "the only ones"
    return "{} of the blocks in live tiles of {} x {} are live".format("enough" if tile == BLOCK else "too few", *BLOCK)


def described_choice(
    kernel: str, block: tuple[int, int], warps: int, stages: int, launch: BoundLaunch, tiles: Tensor, chunks: int,
    walked: tuple[int, int] = BLOCK, why: str = "the only ones",
) -> KernelChoice:  # fmt: skip
    """The description of a kernel for `explain`. tiles: of each item that a program takes, or of each program. why: it
    walks these tiles.
    """
    return KernelChoice(
        kernel, *block, warps, stages, "half", "descriptors: some warps load and send while others multiply",
        f"tiles of {walked[0]} x {walked[1]}: {why}", launch.programs, int(tiles.sum()), int(tiles.max()),
        chunks,
    )  # fmt: skip
