from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from sparseflash.masks import order
from tests.drawn.masks import SEEDS

MOST_TOKENS = 180


@st.composite
def shapes(draw: DrawFn, most: int = MOST_TOKENS) -> tuple[int, ...]:
    axes = draw(st.sampled_from([2, 1, 3]))
    shape, left = [], most
    for axis in range(axes):
        side = draw(st.integers(1, left if axis == axes - 1 else max(1, math.isqrt(left))))
        shape.append(side)
        left //= side
    return tuple(draw(st.permutations(shape)))


def orders(shape: tuple[int, ...]) -> SearchStrategy[Tensor | None]:
    count = math.prod(shape)
    tile = st.tuples(*(st.integers(1, side) for side in shape))
    return st.one_of(
        st.none(),
        tile.map(lambda sizes: order.tiles(shape, sizes)),
        st.sampled_from([order.morton, order.hilbert]).map(lambda curve: curve(shape)),
        tile.map(lambda steps: order.residues(shape, steps)),
        SEEDS.map(lambda seed: torch.from_numpy(np.random.default_rng(seed).permutation(count))),
    )


def all_axes(shape: tuple[int, ...], seen: list[np.ndarray], order: Tensor | None = None) -> Tensor:
    live = np.ones((1, 1), dtype=bool)
    for one in seen:
        live = np.kron(live, one)
    return in_order(torch.from_numpy(live), order)


def in_order(live: Tensor, order: Tensor | None) -> Tensor:
    return live if order is None else live[order][:, order]
