"""A mask as HTML for notebooks: a summary line and an inline SVG drawing, without further libraries."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from sparseflash.draw.cells import Shares, shares
from sparseflash.draw.colours import EMPTY, FULL, GRID, PARTIAL, colours, hexadecimal
from sparseflash.draw.panels import panels

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask

MOST_PANELS = 4
_SIDE = 240  # pixels of the longer side
_LEVELS = 16  # shares are rounded up to sixteenths (so live cells stay visible), for fewer colours and shorter paths


def to_html(mask: BlockMask) -> str:
    """Implements `BlockMask._repr_html_`: a `<div>` of at most 64 KB for any mask.

    >>> from sparseflash import BlockMask
    >>> to_html(BlockMask.dense(64)).startswith("<div><code>BlockMask(64 x 64")
    True

    Up to 64 x 64 cells for a mask with one pattern; for several, 32 x 32 each and only the first `MOST_PANELS`.
    """
    found = panels(mask)
    most = 64 if len(found) == 1 else 32
    drawings = []
    for panel in found[:MOST_PANELS]:
        cells = shares(mask, panel.pattern, most, most, lengths=panel.lengths)
        caption = f"<figcaption>{escape(panel.title)}</figcaption>" if panel.title else ""
        drawings.append(f'<figure style="display:inline-block;margin:4px">{svg(mask, cells)}{caption}</figure>')
    rest = f"<p>and {len(found) - MOST_PANELS} more patterns</p>" if len(found) > MOST_PANELS else ""
    squares = [
        f'<span style="background:{hexadecimal(colour)};border:1px solid {GRID}">&#160;&#160;&#160;</span> {meaning}'
        for colour, meaning in ((FULL, "full"), (PARTIAL, "partial"), (EMPTY, "empty"))
    ]
    size = f"{cells.step[0] * mask.block_q} x {cells.step[1] * mask.block_k} tokens"
    legend = (
        f"<div>{' &#160; '.join(squares)} &#160; paler: fewer live; a cell is {size}; queries down, keys right</div>"
    )
    return f"<div><code>{escape(repr(mask))}</code><br/>{''.join(drawings)}{rest}{legend}</div>"


def svg(mask: BlockMask, cells: Shares) -> str:
    """One drawing: a path of horizontal strokes for each colour, with one stroke per run of equal cells."""
    full, partial = (np.ceil(share * _LEVELS) / _LEVELS for share in (cells.full, cells.partial))
    # Rounded up, the two may sum to more than 1; scaling keeps the hue.
    rgb = colours(full / np.maximum(full + partial, 1), partial / np.maximum(full + partial, 1)).astype(np.int64)
    codes = rgb[..., 0] << 16 | rgb[..., 1] << 8 | rgb[..., 2]
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(codes.tolist()):
        start = 0
        for col in range(1, len(line) + 1):
            if col == len(line) or line[col] != line[start]:
                if line[start] != 0xFFFFFF:
                    paths.setdefault(line[start], []).append(f"M{start} {row}h{col - start}")
                start = col
    strokes = "".join(f'<path stroke="#{code:06x}" d="{"".join(runs)}"/>' for code, runs in paths.items())
    rows, cols = codes.shape
    # The drawing has the mask's proportions in tokens; cells need not be square, nor the last ones whole.
    across = mask.k_len / (cells.step[1] * mask.block_k)
    down = mask.q_len / (cells.step[0] * mask.block_q)
    longest = max(mask.q_len, mask.k_len)
    width, height = (max(8, round(_SIDE * length / longest)) for length in (mask.k_len, mask.q_len))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {across:g} {down:g}" '
        f'preserveAspectRatio="none" shape-rendering="crispEdges" style="border:1px solid {GRID}">'
        f'<rect width="{cols}" height="{rows}" fill="#fff"/>'
        f'<g transform="translate(0 .5)" stroke-width="1" fill="none">{strokes}</g></svg>'
    )
