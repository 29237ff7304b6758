"""Who has reached whom, layer by layer, as a strip of pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflash import BlockMask, analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS, _INCHES = 6, 2.7


def strip(mask: BlockMask, layers: int, *, elements: bool | None = None) -> Figure:
    """The tokens that can have influenced each token after 1, 2, ... `layers` layers of this mask.

    >>> from sparseflash import masks
    >>> found = strip(masks.local(256, window=33, block=32), 3)
    >>> [axes.get_title() for axes in found.axes]
    ['1 layer: 12.5 % reached', '2 layers: 23.8 % reached', '3 layers: 34.3 % reached']

    elements: as for `BlockMask.plot`. Of a mask that differs in the batch, the first element is drawn.
    """
    from matplotlib.figure import Figure

    columns = min(layers, _COLUMNS)
    rows = -(-layers // columns)
    figure = Figure(figsize=(_INCHES * columns, (_INCHES + 0.3) * rows + 0.5), dpi=130, layout="constrained")
    every = figure.subplots(rows, columns, squeeze=False).flat
    first = mask.select(batch=0) if mask.shape[0] > 1 else mask
    for number, axes in enumerate(every, start=1):
        if number > layers:
            axes.remove()
            continue
        reached = analysis.reach(first, number)
        reached.plot(axes, elements=elements, legend=False)
        axes.set_title(f"{number} layer{'s' * (number > 1)}: {100 * reached.density:.3g} % reached", fontsize=10)
        axes.set_xlabel("input token" if number > layers - columns else "")
        axes.set_ylabel("token" if number % columns == 1 or columns == 1 else "")
    of = ", batch element 0" if first is not mask else ""
    figure.suptitle(f"Who can have influenced whom, {mask.q_len:,} tokens{of}", fontsize=11)
    return figure
