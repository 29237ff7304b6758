"""Chooses the tiles, loads and arithmetic of a portable kernel for given tensors."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.triton.configs import Arithmetic, Config, Kernel, arithmetic_of
from sparseflash.backends.triton.device_functions.fp32_split import is_in_pieces
from sparseflash.backends.triton.family import Setting
from sparseflash.backends.triton.overrides import overrides
from sparseflash.backends.triton.portable.fitting import (
    config_for,
    held_and_streamed,
    padded_dims,
    tuned_for_scores,
    with_addresses,
    with_more_registers,
)
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.backends.triton.schedule.tilings import FP32, HALF, Tile, Tiling
from sparseflash.scores.change import PAIRS

_ANY_BLOCK = (256, 256)


class Choice(NamedTuple):
    """How one kernel runs."""

    config: Config
    tiling: Tiling  # of its tile lists
    descriptors: bool  # TMA loads the tiles
    describes_rows: bool  # TMA also loads lse2 and delta, in the kernel that streams queries
    arithmetic: Arithmetic
    pieces: bool  # tensors are stored in pieces, see fp32_split.py
    padded: tuple[int, int]  # padded head dims of queries and keys, and of values
    why_descriptors: str  # why TMA is used, or why not
    why_tiling: str


class Chooser:
    """Chooses for one kernel and tensors of one layout. The tiling also depends on the plan."""

    def __init__(
        self, kernel: Kernel, setting: Setting, dims: tuple[int, int], q: Tensor, v: Tensor, *, is_expanded: bool,
        changes: Collection[str] = (),
    ) -> None:  # fmt: skip
        """dims: D and Dv. q, v: examples. is_expanded: whether any tensor that the kernel loads by tiles is expanded.
        changes: the kinds of score modifications that the kernel applies.
        """
        self._overrides = overrides()
        self._kernel, self._architecture = kernel, setting.architecture
        self._lengths, self._dropout = setting.lengths, setting.dropout
        self._changes = changes
        self._pieces = is_in_pieces(q)
        self._arithmetic = arithmetic_of(torch.float32 if self._pieces else q.dtype, setting.tf32)
        if self._pieces:
            self._padded = q.shape[-1], v.shape[-1]
        else:
            # In full fp32, matrix instructions read bf16 pieces, even if tiles are split after they are loaded.
            itemsize = 2 if self._arithmetic == "fp32" else q.element_size()
            self._padded = padded_dims(*dims, self._architecture, itemsize)
        self._why_not_described = ""
        if not self._architecture.has_tma:
            self._why_not_described = "GPUs before Hopper have no TMA"
        elif is_expanded:
            self._why_not_described = "a tensor is expanded"
        elif not self._overrides.descriptors:
            self._why_not_described = "overridden"
        self._may_describe = not self._why_not_described
        # The configuration of descriptors that was tuned for the score modifications.
        self._tuned: Config | None = None
        if changes:
            self._tuned = tuned_for_scores(kernel, self._architecture, self._arithmetic, max(self._padded), changes)
        self._block = setting.block
        self._products_a_tile = setting.block[0] * setting.block[1] * sum(dims)
        self._choices: dict[tuple[Tiling, str], Choice] = {}

    def choice(self, plan: Plan) -> Choice:
        tiling, why = self._tiling(plan)
        key = tiling or Tiling(*held_and_streamed(self._kernel, self._block)), why
        chosen = self._choices.get(key)
        if chosen is None:
            chosen = self._choices[key] = self._choose(*key)
        return chosen

    def _tiling(self, plan: Plan) -> tuple[Tiling | None, str]:
        """`(tiling, why)`, with None for the tiles of the mask."""
        retiling, axis, wanted = plan.lists.retiling, int(self._kernel == "dk_dv"), self._overrides.tiling
        few = plan.tiles_per_head * self._products_a_tile < self._overrides.products_for_tilings
        if retiling is None:
            why = "every score is live" if plan.lists.reusable else "a mask made on the GPU may be used only once"
            return None, why
        if "tile_bias" in self._changes:
            return None, "a bias is stored for these tiles"
        if wanted is None and few:
            return None, "there is too little work to search for others"
        whole, gathered = (
            held_and_streamed(self._kernel, self._config(_ANY_BLOCK, descriptors)[:2])
            for descriptors in (self._may_describe, False)
        )
        if wanted is not None:
            return wanted(retiling.candidates(axis, whole, gathered)), "overridden"
        cost = FP32 if self._arithmetic == "fp32" else HALF
        return plan.tiling(axis, whole, gathered, cost, self._warps), "the cheapest by the model in tilings.TILE_COSTS"

    def _choose(self, tiling: Tiling, why_tiling: str) -> Choice:
        block = held_and_streamed(self._kernel, (tiling.held, tiling.streamed))
        # Tiles of fewer than 64 rows are too small for instructions that multiply from shared memory (wgmma,
        # tcgen05), so they are multiplied from registers. TMA would load them to shared memory first, which costs too
        # much with wide heads or pieces.
        rows = min(block)
        if self._pieces:
            rows = held_and_streamed(self._kernel, self._config(block, True)[:2])[0]
        from_shared = self._architecture.reads_shared and rows >= 64
        few_registers = max(self._padded) <= 128 and self._arithmetic != "fp32"
        why = self._why_not_described
        if not why and tiling.gathered:
            why = "TMA cannot gather blocks"
        if not why and not (few_registers or from_shared):
            why = "tiles that are multiplied from registers need not come through shared memory"
        descriptors = not why
        config = self._config(block, descriptors)
        if self._kernel not in self._overrides.configs:  # an override is not adjusted
            config = self._fitted(config, tiling, tuned=descriptors and self._tuned is not None)
        # TMA writes to multiples of 128 bytes of shared memory, and 16 numbers take only 64.
        describes_rows = self._kernel == "dk_dv" and descriptors and self._arithmetic == "half" and config.block_m >= 32
        return Choice(
            config, tiling, descriptors, describes_rows, self._arithmetic, self._pieces, self._padded,
            why or "TMA needs no registers for addresses", why_tiling,
        )  # fmt: skip

    def _fitted(self, config: Config, tiling: Tiling, *, tuned: bool) -> Config:
        config = with_more_registers(
            config, lengths=self._lengths, dropout=self._dropout, changes=len(self._changes) > 0 and not tuned
        )
        table = "relative" in self._changes
        if tuned or not (table or not set(PAIRS).isdisjoint(self._changes)):
            return config
        return with_addresses(
            self._kernel, config, max(self._padded), arithmetic=self._arithmetic, table=table,
            whole=tiling.gathered > 0,
        )  # fmt: skip

    def _config(self, block: tuple[int, int], descriptors: bool) -> Config:
        config = self._overrides.configs.get(self._kernel)
        if config is not None:
            return config._replace(block_m=min(config.block_m, block[0]), block_n=min(config.block_n, block[1]))
        return config_for(
            self._kernel, self._architecture, self._arithmetic, max(self._padded), block, descriptors,
            self._tuned if descriptors else None,
        )  # fmt: skip

    def _warps(self, tile: Tile, is_gathered: bool) -> int:
        return self._config(held_and_streamed(self._kernel, tile), self._may_describe and not is_gathered).num_warps


def wants_pieces(q: Tensor, v: Tensor, setting: Setting, group: int) -> bool:
    """Whether fp32 tensors are split into pieces by a separate kernel, before the attention kernels load them.

    How often kernels read it depends on the mask; the upper bound, the number of query tiles, decides.
    """
    if q.dtype != torch.float32 or setting.tf32 or not overrides().pieces:
        return False
    padded = padded_dims(q.shape[-1], v.shape[-1], setting.architecture, itemsize=2)
    if not setting.architecture.tables.has_room_for_pieces(max(padded)):
        return False
    return group * -(-q.shape[2] // setting.block[0]) >= 2
