"""Chooses the kernels and tiles of the Hopper backward, and describes the Hopper kernels for `explain`."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor

from sparseflash.backends.triton.family import KernelChoice
from sparseflash.backends.triton.hopper.configs import BLOCK, SMALL, WIDEST_BACKWARD, may_be_small
from sparseflash.backends.triton.launcher import BoundLaunch
from sparseflash.backends.triton.schedule.plan import Plan

# Tiles of 64 are taken for the backward where at most this share of the blocks of 64 in live tiles of 128 is live, by
# the head dims up to which it holds: experiments/results/tried/choice.csv. In tiles of 128 one pass has 5 products, in
# tiles of 64 two kernels have 7. The share is 0.94 under a window of 1,024 tokens, 0.6 for windows in a video, and 0.3
# where 12 % of all blocks are live at random; the time in tiles of 64 over that in tiles of 128 was 1.22 (D = 64) and
# 1.29 times the share.
MOST_FILLED = {64: 0.82, 128: 0.78}


class BackwardForm(NamedTuple):
    """The kernels of a backward."""

    tile: tuple[int, int]  # BLOCK or SMALL
    in_two: bool  # one kernel for dk and dv, and one for dq; otherwise one for all, which adds dq in a fixed order


def backward_form(plan: Plan, block: tuple[int, int], dims: tuple[int, int], kinds: Collection[str]) -> BackwardForm:
    """The form of the backward. Counting live tiles synchronises with the device, once per mask. kinds: of score
    modifications.
    """
    if may_be_small(block, dims, kinds) and plan.filled(block, BLOCK) <= most_filled(dims):
        return BackwardForm(SMALL, True)
    return BackwardForm(BLOCK, max(dims) > WIDEST_BACKWARD)


def most_filled(dims: tuple[int, int]) -> float:
    """Up to this share of live tiles, tiles of 64 are faster. dims: D and Dv."""
    return next(share for dim, share in MOST_FILLED.items() if max(dims) <= dim)


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
