"""Learned tables of relative positions on grids of two or three axes: images and videos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from sparseflash.blockmask.arguments import have_contents
from sparseflash.limits import check_count
from sparseflash.scores.change import Change, Sizes, floating, per_head
from sparseflash.scores.relative import Codes


@dataclass(frozen=True, eq=False)
class Grid(Change, prepared=False):
    """A table over the offsets of cells of a grid; see `relative_2d`."""

    kind = "relative"
    order = 3
    table: Tensor  # [Hq, *(2 * n - 1 for n in shape)]
    shape: tuple[int, ...]
    cells: Tensor | None

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.table,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Change:
        return replace(self, table=tensors[0])

    def prepared(self, sizes: Sizes) -> Codes:
        per_head(self.table, "table", sizes)
        codes = []
        for name, length in (("q", sizes.q_len), ("k", sizes.k_len)):
            if self.cells is None:
                if length % prod(self.shape):
                    raise ValueError(
                        f"{name} must be one or several whole grids of {prod(self.shape)} tokens; got {length}. Say "
                        "with cells= where each token lies."
                    )
                cells = torch.arange(length, device=sizes.device) % prod(self.shape)
            elif len(self.cells) != length:
                raise ValueError(f"cells must have one number for each of the {length} tokens; got {len(self.cells)}.")
            else:
                cells = self.cells.to(sizes.device)
            codes.append(_codes(cells, self.shape))
        wide = [2 * n - 1 for n in self.shape]
        check_count("entries of a table", *wide, remedy="Use a smaller grid.")
        count = prod(wide)
        # The difference of two codes plus a constant is the place in the flattened table.
        buckets = torch.arange(count, dtype=torch.int32, device=sizes.device)
        return Codes(self.table.flatten(1), buckets, codes[0] + count // 2, codes[1], buckets[:0])


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    # Lists, because torch.compile cannot trace generators here.
    return tuple([prod([2 * n - 1 for n in shape[axis + 1 :]]) for axis in range(len(shape))])


def _codes(cells: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Numbers of cells in a grid of the table's shape: their differences tell all offsets apart."""
    code = torch.zeros_like(cells)
    for n, stride in zip(reversed(shape), reversed(_strides(shape))):
        code += cells % n * stride
        cells = cells // n
    return code.to(torch.int32)


def relative_2d(table: Tensor, height: int, width: int, *, cells: Tensor | None = None) -> Grid:
    """Adds `table[h, yi - yj + height - 1, xi - xj + width - 1]` for tokens on a grid, row after row.

    >>> from sparseflash import attention, masks, scores
    >>> q, k, v = (torch.randn(1, 3, 4 * 49, 16) for _ in range(3))
    >>> table = torch.randn(3, 13, 13, requires_grad=True)
    >>> windows = masks.documents([49] * 4, causal=False)  # Swin's: four windows of 7 x 7, one after another
    >>> attention(q, k, v, windows, scores=scores.relative_2d(table, 7, 7)).shape
    torch.Size([1, 3, 196, 16])

    Args:
        table: `[Hq, 2 * height - 1, 2 * width - 1]`, which may be learned.
        cells: int64 `[N]`, the number of each token's cell, `y * width + x`, if tokens lie in another order.

    A sequence may hold several grids of this shape one after another, such as windows. Tokens of different grids have
    the offset of their cells, as if both lay in one grid.

    Source: Liu et al., "Swin Transformer", ICCV 2021, whose tables are the transpose, `[(2M - 1)^2, Hq]`.
    """
    return _grid(table, (height, width), cells)


def relative_3d(table: Tensor, frames: int, height: int, width: int, *, cells: Tensor | None = None) -> Grid:
    """As `relative_2d`, for `table [Hq, 2 * frames - 1, 2 * height - 1, 2 * width - 1]` and tokens of a video.

    >>> relative_3d(torch.zeros(2, 3, 13, 13), 2, 7, 7).shape
    (2, 7, 7)

    A cell's number is `(t * height + y) * width + x`. Source: Liu et al., "Video Swin Transformer", CVPR 2022.
    """
    return _grid(table, (frames, height, width), cells)


def _grid(table: Tensor, shape: tuple[int, ...], cells: Tensor | None) -> Grid:
    table = floating(table, "table")
    if not all(isinstance(n, int) and n > 0 for n in shape):
        raise ValueError(f"the grid must have positive integers as its sides; got {list(shape)}.")
    wanted: Sequence[int] = [2 * n - 1 for n in shape]
    if table.ndim != len(shape) + 1 or list(table.shape[1:]) != list(wanted):
        raise ValueError(f"table must have shape {['Hq', *wanted]}; got {list(table.shape)}.".replace("'", ""))
    if cells is not None:
        if not isinstance(cells, Tensor):
            raise TypeError(f"cells must be a tensor; got {type(cells).__name__}.")
        if cells.ndim != 1 or cells.dtype != torch.int64:
            raise ValueError(f"cells must be int64 [N]; got {cells.dtype}, shape {list(cells.shape)}.")
        if len(cells) and have_contents(cells) and not 0 <= int(cells.min()) <= int(cells.max()) < prod(shape):
            raise ValueError(f"cells must lie in 0..{prod(shape) - 1}; got {int(cells.min())} to {int(cells.max())}.")
    return Grid(table, shape, cells)
