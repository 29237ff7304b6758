"""Describes the Hopper kernels for `explain`."""

from __future__ import annotations

from torch import Tensor

from sparseflash.backends.triton.family import KernelChoice
from sparseflash.backends.triton.hopper.configs import BLOCK
from sparseflash.backends.triton.launcher import BoundLaunch


def described_choice(
    kernel: str, block: tuple[int, int], warps: int, stages: int, launch: BoundLaunch, tiles: Tensor, chunks: int,
    walked: tuple[int, int] = BLOCK,
) -> KernelChoice:  # fmt: skip
    """The description of a kernel for `explain`. tiles: of each item that a program takes, or of each program."""
    return KernelChoice(
        kernel, *block, warps, stages, "half", "descriptors: some warps load and send while others multiply",
        f"tiles of {walked[0]} x {walked[1]}: the only ones", launch.programs, int(tiles.sum()), int(tiles.max()),
        chunks,
    )  # fmt: skip
