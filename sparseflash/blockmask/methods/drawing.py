"""Methods of `BlockMask` that draw it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, overload

from sparseflash.blockmask.methods import method

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sparseflash.blockmask import BlockMask


@method
def to_string(
    mask: BlockMask,
    width: int | None = None,
    *,
    heads: int | Iterable[int] | None = None,
    batch: int | Iterable[int] | None = None,
    ascii: bool = False,
) -> str:
    """A drawing in characters under a summary line, at most `width` columns wide (by default the terminal's width).

    >>> print(BlockMask.from_function(lambda q, k: k <= q, 500, block=64).to_string(40))
    BlockMask(500 x 500, blocks of 64, 36 tiles: 21 full + 15 partial (3 distinct), density 50.1 %)
    ▒▒··············
    ██▒▒············
    ████▒▒··········
    ██████▒▒········
    ████████▒▒······
    ██████████▒▒····
    ████████████▒▒··
    ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▒▒
    █ full  ▓▒░ partly live: 2/3, 1/3, less  · empty; a cell is 64 x 64 tokens

    Args:
        width: columns, at least 2; by default the terminal's width.
        heads, batch: the selection, by index; by default all. Each distinct pattern is drawn once, at most 16 of
            them.
        ascii: draw with `#*+-.` instead.

    Queries run down and keys to the right. A cell is a tile, or a square of 2 x 2, 4 x 4, ... tiles if they do not
    fit, and shows the exact mean. `█`: only full tiles; `▓`, `▒`, `░`: at least 2/3, at least 1/3, less than 1/3 of
    the scores live; `·`: none.

    Raises ValueError if width is below 2, or a head or batch element is out of range.
    """
    from sparseflash.draw import text

    return text.to_string(mask.canonical(), width, heads=heads, batch=batch, ascii=ascii)


@overload
def plot(
    mask: BlockMask, ax: None = None, *, heads: int | Iterable[int] | None = None,
    batch: int | Iterable[int] | None = None,
    elements: bool | None = None, cells: int = 512, legend: bool = True,
    by_head: bool = False,
) -> Figure: ...  # fmt: skip


@overload
def plot(
    mask: BlockMask, ax: Axes, *, heads: int | Iterable[int] | None = None,
    batch: int | Iterable[int] | None = None,
    elements: bool | None = None, cells: int = 512, legend: bool = True,
    by_head: bool = False,
) -> Axes: ...  # fmt: skip


@method
def plot(
    mask: BlockMask,
    ax: Axes | None = None,
    *,
    heads: int | Iterable[int] | None = None,
    batch: int | Iterable[int] | None = None,
    elements: bool | None = None,
    cells: int = 512,
    legend: bool = True,
    by_head: bool = False,
) -> Figure | Axes:
    """A matplotlib picture: queries down, keys to the right, both in tokens.

    >>> figure = BlockMask.dense(4096).plot()
    >>> figure.axes[0].get_xlabel(), figure.axes[0].get_title()
    ('key (token)', '100 % live')

    Args:
        ax: axes for the one selected pattern, which are returned: `mask.plot(plt.gca())`. Without it, returns a new
            Figure with a panel for each distinct pattern (at most 16); it is not registered with pyplot and opens
            no window. Save it with `figure.savefig("mask.png")`.
        heads, batch: the selection, by index; by default all.
        elements: draw every single score instead of tiles: by default up to 1,024 tokens, on request up to 4,096.
        cells: the largest number of cells on a side. If a side has more tiles, one cell shows a square of 2 x 2,
            4 x 4, ... tiles, in a tint that shows its exact share of live scores.
        legend: draw the meanings of the colours.
        by_head: a panel for each head instead, equal ones, too (at most 64); batch elements begin a row of their own.

    Full tiles are blue. Partial tiles are orange, paler with fewer live scores. Time is proportional to the live
    tiles.

    Needs the extra `plot`. Raises ImportError without matplotlib; ValueError for several patterns on one `ax`, a
    head or batch element out of range, or `elements` for a mask that is too long.
    """
    from sparseflash.draw import figure

    return figure.plot(
        mask.canonical(), ax, heads=heads, batch=batch, elements=elements, cells=cells, legend=legend, by_head=by_head
    )


@method
def _repr_html_(mask: BlockMask) -> str:
    """The summary line and a small drawing, for notebooks: at most 64 KB, without matplotlib."""
    from sparseflash.draw.html import to_html

    return to_html(mask.canonical())
