"""The masks of the benchmark: which blocks and scores are live, defined independently of the library.

The exactness check uses these definitions, not `BlockMask`, so that a fault in the library's mask is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

import sparseflash.masks as masks
from experiments.benchmarks.speed.grid import grid
from sparseflash import BlockMask

Rule = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Pattern:
    """The live scores of one head, with blocks of `block` tokens and M = length / block blocks on each side.

    A score (q, k) is live where `full[q // block, k // block]`, and where `partial[q // block, k // block]` and
    `rule(q, k)`. `kept` is the number of live scores, from a closed form if there is a rule.
    """

    length: int  # tokens
    block: int  # tokens
    full: Tensor  # bool [M, M]
    partial: Tensor  # bool [M, M]
    kept: int  # scores
    rule: Rule | None = None

    @property
    def density(self) -> float:
        """Live scores over all scores."""
        return self.kept / self.length**2

    def live(self, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        """Bools for broadcastable int64 token positions, on the device of the pattern."""
        rows, columns = q_idx // self.block, k_idx // self.block
        live = self.full[rows, columns]
        if self.rule is not None:
            live = live | (self.partial[rows, columns] & self.rule(q_idx, k_idx))
        return live

    def to(self, device: torch.device | str) -> Pattern:
        """The same pattern with its layouts on `device`."""
        return replace(self, full=self.full.to(device), partial=self.partial.to(device))


def dense(blocks: int) -> np.ndarray:
    """Layout [M, M]: everything."""
    return np.ones((blocks, blocks), dtype=bool)


def _indices(blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Block rows [M, 1] and columns [1, M], in int32: a million tokens have 67 million pairs of blocks."""
    places = np.arange(blocks, dtype=np.int32)
    return places[:, None], places[None, :]


def butterfly(blocks: int) -> np.ndarray:
    """Layout [M, M]: i == j, or i XOR j a power of two."""
    i, j = _indices(blocks)
    differing = i ^ j
    layout: np.ndarray = (differing & (differing - 1)) == 0
    return layout


def local(blocks: int, reach: int = 4) -> np.ndarray:
    """Layout [M, M]: |i - j| <= reach, in blocks."""
    i, j = _indices(blocks)
    layout: np.ndarray = np.abs(i - j) <= reach
    return layout


def bigbird(blocks: int, *, globals_: int = 2, reach: int = 1, random: int = 3, seed: int = 0) -> np.ndarray:
    """Layout [M, M]: the first `globals_` rows and columns, |i - j| <= reach, `random` blocks drawn a row."""
    layout = local(blocks, reach)
    layout[:globals_] = True
    layout[:, :globals_] = True
    # NumPy has frozen RandomState's stream, so every version draws the same layout.
    generator = np.random.RandomState(seed)
    for row in range(blocks):
        layout[row, generator.permutation(blocks)[:random]] = True
    return layout


def random(blocks: int, density: float = 0.129, *, seed: int = 0) -> np.ndarray:
    """Layout [M, M]: the diagonal, and blocks drawn anywhere until the share `density` of all blocks is live."""
    layout = np.eye(blocks, dtype=bool)
    others = np.flatnonzero(~layout.reshape(-1))
    drawn = max(0, round(density * blocks**2) - blocks)
    layout.reshape(-1)[np.random.RandomState(seed).permutation(others)[:drawn]] = True
    return layout


def of_layout(layout: np.ndarray, length: int, block: int) -> Pattern:
    """The pattern whose blocks are wholly live or wholly dead."""
    full = torch.from_numpy(layout)
    return Pattern(length, block, full, torch.zeros_like(full), int(layout.sum()) * block**2)


def causal(length: int, block: int) -> Pattern:
    """k <= q, exact to the element."""
    i, j = _indices(length // block)
    kept = length * (length + 1) // 2
    return Pattern(length, block, torch.from_numpy(i > j), torch.from_numpy(i == j), kept, lambda q, k: k <= q)


def window(length: int, block: int, reach: int) -> Pattern:
    """|q - k| <= reach, in tokens, exact to the element."""
    i, j = _indices(length // block)
    offset = np.abs(i - j) * block
    nearest, farthest = np.maximum(offset - (block - 1), 0), offset + block - 1
    full = farthest <= reach
    partial = (nearest <= reach) & ~full
    near = min(reach, length - 1)
    kept = length + 2 * (near * length - near * (near + 1) // 2)
    return Pattern(
        length,
        block,
        torch.from_numpy(full),
        torch.from_numpy(partial),
        kept,
        lambda q, k: (q - k).abs() <= reach,
    )


def neighborhood(length: int, block: int) -> Pattern:
    """The tokens of an image near the query's, in tile order; grid.py has the rule."""
    image = grid(length, block)
    full, partly = (torch.from_numpy(layout) for layout in image.blocks())
    return Pattern(length, block, full, partly, image.kept, image.live)


LAYOUTS: dict[str, Callable[[int], np.ndarray]] = {
    "dense": dense,
    "butterfly": butterfly,
    "local": local,
    "bigbird": bigbird,
    "random12": random,
    "random03": partial(random, density=0.03),
    "random50": partial(random, density=0.5),
}
WINDOWS = {"window64": 64, "window256": 256}  # reach in tokens
KINDS = ("causal", *LAYOUTS, *WINDOWS, "neighborhood")


def pattern(kind: str, length: int, block: int) -> Pattern:
    """The pattern named `kind` (one of KINDS) over `length` tokens, a multiple of `block`."""
    if length % block:
        raise ValueError(f"length must be a multiple of the block; got {length} tokens in blocks of {block}.")
    if kind == "causal":
        return causal(length, block)
    if kind in WINDOWS:
        return window(length, block, WINDOWS[kind])
    if kind == "neighborhood":
        return neighborhood(length, block)
    if kind in LAYOUTS:
        return of_layout(LAYOUTS[kind](length // block), length, block)
    raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}.")


def block_mask(kind: str, length: int, block: int) -> BlockMask:
    """The same mask as a user of the library would make it."""
    if kind == "dense":
        return BlockMask.dense(length, block=block)
    if kind == "causal":
        return masks.causal(length, block=block)
    if kind == "butterfly":
        return masks.butterfly(length, block=block)
    if kind in WINDOWS:
        return masks.local(length, window=2 * WINDOWS[kind], block=block)  # a window of w keys sees |q - k| <= w // 2
    if kind == "neighborhood":
        image = grid(length, block)
        shape, tile = (image.height, image.width), (image.tile_height, image.tile_width)
        window_ = (image.window_height, image.window_width)
        return masks.neighborhood(shape, window=window_, order=masks.order.tiles(shape, tile), block=block)
    return BlockMask.from_layout(pattern(kind, length, block).full, block=block)
