"""Score modifications of packed sequences: positions are those within each sequence."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

import torch

from sparseflash.scores.change import Change, Scores, check_placed
from sparseflash.scores.distance import Distance
from sparseflash.scores.function import Function
from sparseflash.scores.grids import Grid
from sparseflash.scores.positions import Packed, places_of, with_positions
from sparseflash.scores.relative import Relative


def packed(changes: Scores, q_sums: tuple[int, ...], k_sums: tuple[int, ...], device: torch.device) -> Scores:
    """The modifications for the packed tokens of sequences with these running sums, for one call of `attention`.

    >>> from sparseflash import scores
    >>> alibi = scores.Scores((scores.alibi(torch.ones(2)),))
    >>> packed(alibi, (0, 5, 9), (0, 5, 9), torch.device("cpu")).kinds
    ('distance',)
    >>> packed(alibi, (0, 1, 2), (0, 5, 9), torch.device("cpu")).kinds  # reads positions from tensors
    ('function',)

    Tensors along tokens are packed as q and k are.

    Raises ValueError for modifications that cannot tell sequences apart.
    """
    check_placed(changes, "of packed sequences")
    sequences, found = Packed(q_sums, k_sums), list[Change]()
    distance: Distance | None = None
    function: Function | None = None
    for change in changes.changes:
        if isinstance(change, Distance) and not sequences.is_even:
            distance = change
        elif isinstance(change, Function):
            if change.kernel is not None:
                raise ValueError(
                    "scores.function must be given without kernel= for packed sequences, where a kernel would get "
                    "places among all packed tokens; pass the PyTorch function alone."
                )
            function = change
        elif isinstance(change, Relative):
            found.append(replace(change, sums=(q_sums, k_sums)))
        else:
            if isinstance(change, Grid) and change.cells is None:
                _check_whole_grids(change, q_sums, k_sums)
            found.append(change)
    made = Scores(tuple(found))
    if distance is None and function is None:
        return made
    return made + with_positions(distance, function, 0, places_of(sequences, device))


def _check_whole_grids(grid: Grid, *sums: tuple[int, ...]) -> None:
    cells = prod(grid.shape)
    for each in sums:
        for start, stop in pairwise(each):
            if (stop - start) % cells:
                raise ValueError(
                    f"every sequence must be one or several whole grids of {cells} tokens; got one of {stop - start}. "
                    "Say with cells= where each packed token lies."
                )
