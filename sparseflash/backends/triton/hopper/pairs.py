"""Biases of (query, key) pairs, which the Hopper kernels read without a copy, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.alignment import aligned_start, with_padded_rows
from sparseflash.backends.triton.changes.tile_bias import numbers_of_tiles
from sparseflash.backends.triton.hopper.configs import BLOCK
from sparseflash.backends.triton.hopper.descriptors import described_as
from sparseflash.backends.triton.launch.examples import like
from sparseflash.backends.triton.launch.launches import launch_of
from sparseflash.backends.triton.launcher import BoundLaunch, Describe
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.worklists import TileLists
from sparseflash.blockmask.streams import ReadyEvent
from sparseflash.scores.change import Scores

ROWS, KEYS = (tl.constexpr(size) for size in BLOCK)


@triton.jit(do_not_specialize=["q_len", "k_len", "width"])
def clear_kernel(
    dpairs_ptr,  # [B, Hq, Nq, width] contiguous, written where a tile is dead
    start_ptr, full_ptr, count_ptr, index_ptr,  # `TileLists` over rows
    pattern_ptr,  # int32 [B, Hq] contiguous
    q_len, k_len, width,  # width: the stride of rows, a multiple of 8
):  # fmt: skip
    """Zeroes the dead tiles in one row of tiles of one batch element and head."""
    row_tiles = tl.cdiv(q_len, ROWS)
    batch_head, row = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
    line = tl.load(pattern_ptr + batch_head) * row_tiles + row
    start = tl.load(start_ptr + line)
    partial = start + tl.load(full_ptr + line)
    stop = start + tl.load(count_ptr + line)
    # Tiles increase in both parts of a list: the full ones, and the others.
    next_full, next_partial = start, partial
    q = row * ROWS + tl.arange(0, ROWS)
    key = tl.arange(0, KEYS)
    rows = tl.multiple_of((tl.cast(batch_head, tl.int64) * q_len + q) * (width // 8) * 8, 8)
    targets = dpairs_ptr + (rows[:, None] + key[None, :])
    for column in range(tl.cdiv(k_len, KEYS)):
        is_full = tl.load(index_ptr + next_full, mask=next_full < partial, other=-1) == column
        is_partial = tl.load(index_ptr + next_partial, mask=next_partial < stop, other=-1) == column
        next_full += is_full.to(tl.int32)
        next_partial += is_partial.to(tl.int32)
        if not (is_full | is_partial):
            # In vectors of eight: the padding between the end of a row and its width may hold anything.
            inside = (q < q_len)[:, None] & (key // 8 * 8 + column * KEYS < k_len)[None, :]
            zeros = tl.zeros([ROWS, KEYS], dpairs_ptr.dtype.element_ty)
            tl.store(targets + column * KEYS, zeros, mask=inside)


class Pairs:
    """A bias of pairs as the kernels read it, prepared for tensors of one layout."""

    kind = "bias"

    def __init__(self, changes: Scores, box: tuple[int, int]) -> None:
        """box: queries and keys that are loaded at a time."""
        self._box = box
        self.examples = {name: like(x) for name, x in self(changes).items()}
        self.described: Describe = described_as(self.examples["pairs_desc"], *box)
        self.numbers = self._numbers(changes)

    def _numbers(self, changes: Scores) -> dict[str, int]:
        batch, heads = changes.find("bias").values.shape[:2]
        return {"has_batches": int(batch > 1), "has_heads": int(heads > 1)}

    def __call__(self, changes: Scores) -> dict[str, Tensor]:
        """The kernels' arguments for one call."""
        return {"pairs_desc": changes.find("bias").values}

    def gradients(self, device: torch.device) -> PairGradients | StoredPairGradients:
        """Prepares the gradient, of a bias that no batch elements or heads share."""
        return PairGradients(self.examples["pairs_desc"], self._box, device)


class StoredPairs(Pairs):
    """A bias of pairs that is stored for live tiles only, one below another."""

    kind = "tile_bias"

    def _numbers(self, changes: Scores) -> dict[str, int]:
        of_batch, of_head, *of_patterns, rows, words = numbers_of_tiles(changes.find("tile_bias"))
        return {
            "tiles_of_batch": of_batch, "tiles_of_head": of_head, "has_batches": of_patterns[0],
            "has_heads": of_patterns[1], "tile_rows": rows, "tile_words": words,
        }  # fmt: skip

    def __call__(self, changes: Scores) -> dict[str, Tensor]:
        values, numbers, pattern = (aligned_start(x.contiguous()) for x in changes.find("tile_bias").tensors())
        return {"pairs_desc": _below_one_another(values), "tile_numbers_ptr": numbers, "tile_pattern_ptr": pattern}

    def gradients(self, device: torch.device) -> PairGradients | StoredPairGradients:
        return StoredPairGradients(self.examples["pairs_desc"], self._box)


def pairs_of(changes: Scores | None, box: tuple[int, int]) -> Pairs | None:
    """The bias added to each (query, key) pair, or None if the score modifications have none."""
    if changes is None:
        return None
    return next((each(changes, box) for each in (Pairs, StoredPairs) if changes.find(each.kind)), None)


@dataclass(frozen=True)
class _LiveTiles:
    """The live tiles of a plan."""

    lists: TileLists  # over rows
    pattern: Tensor  # int32 [B, Hq] contiguous
    ready: ReadyEvent = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ready", ReadyEvent((self.lists, self.pattern)))

    @classmethod
    def of(cls, plan: Plan) -> _LiveTiles:
        lists = plan.lists.get(0, Tiling(*BLOCK))
        lists.ready.wait()
        return cls(lists.to(plan.device), plan.pattern.contiguous())


class PairGradients:
    """Prepares the gradient of a bias of pairs, for tensors of one layout.

    The backward kernel writes live tiles. Dead tiles, half of a causal mask, are zeroed here.
    """

    def __init__(self, pairs: Tensor, box: tuple[int, int], device: torch.device) -> None:
        padded = with_padded_rows(pairs)
        self.q_len, k_len = pairs.shape[2:]
        self.example = padded[..., :k_len]
        self.described: Describe = described_as(self.example, *box)
        numbers = {"q_len": self.q_len, "k_len": k_len, "width": padded.shape[3]}
        self._clear = launch_of(
            clear_kernel, {}, numbers, {"dpairs_ptr": padded}, device, {},
            bound=("start_ptr", "full_ptr", "count_ptr", "index_ptr", "pattern_ptr"), num_warps=4, num_stages=1,
        )  # fmt: skip

    def bind(self, plan: Plan, block: tuple[int, int]) -> BoundPairGradients:
        """For a plan of a mask in blocks of `block`."""
        if plan.has_every_tile(block):
            return BoundPairGradients(None)
        live = plan.derived("live tiles of hopper's pairs", lambda: _LiveTiles.of(plan))
        clear = self._clear.bind(
            plan.pattern.numel() * -(-self.q_len // BLOCK[0]), start_ptr=live.lists.start, full_ptr=live.lists.full,
            count_ptr=live.lists.count, index_ptr=live.lists.index, pattern_ptr=live.pattern,
        )  # fmt: skip
        return BoundPairGradients((clear, live.ready))


class BoundPairGradients:
    """Makes the tensor of the gradient, with dead tiles zeroed."""

    def __init__(self, clearing: tuple[BoundLaunch, ReadyEvent] | None) -> None:
        """clearing: the launch that zeroes dead tiles, and the event after which it may read the lists; None if no tile
        is dead.
        """
        self._clearing = clearing

    def __call__(self, changes: Scores) -> tuple[Tensor, Tensor]:
        """`(the gradient, the tensor that the kernel writes)`."""
        values = changes.find("bias").values
        padded = with_padded_rows(values)
        if self._clearing is not None:
            clear, ready = self._clearing
            ready.wait()
            clear({"dpairs_ptr": padded})
        found = padded[..., : values.shape[3]]
        return found, found

    def launches(self) -> list[BoundLaunch]:
        """The kernels that a call launches."""
        return [] if self._clearing is None else [self._clearing[0]]


class StoredPairGradients:
    """Prepares the gradient of a bias that is stored for live tiles. The backward kernel writes all tiles of the
    pattern of a batch element and head.
    """

    def __init__(self, pairs: Tensor, box: tuple[int, int]) -> None:
        self.example = torch.empty_like(pairs)
        self.described: Describe = described_as(self.example, *box)

    def bind(self, plan: Plan, block: tuple[int, int]) -> BoundStoredPairGradients:
        """As `PairGradients.bind`."""
        return BoundStoredPairGradients()


class BoundStoredPairGradients:
    """Makes the tensor of the gradient, with tiles of other heads' patterns zeroed."""

    def __call__(self, changes: Scores) -> tuple[Tensor, Tensor]:
        """As `BoundPairGradients.__call__`."""
        tiles = changes.find("tile_bias")
        found = torch.empty_like(tiles.values, memory_format=torch.contiguous_format)
        if len(tiles.tile_numbers) > 1:
            found.zero_()
        return found, _below_one_another(found)

    def launches(self) -> list[BoundLaunch]:
        """The kernels that a call launches."""
        return []


def _below_one_another(values: Tensor) -> Tensor:
    """Tiles `[B, H, tiles, block_q, block_k]`, viewed as one head. Without tiles, one tile that is never read, because
    a descriptor needs a tensor that is not empty.
    """
    if values.numel() == 0:
        return values.new_empty(1, 1, *values.shape[3:])
    return values.view(1, 1, -1, values.shape[4])
