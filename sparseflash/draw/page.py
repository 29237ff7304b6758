"""A mask as a page of its own for a browser: zoom with the wheel down to single scores, move by dragging, hover."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from sparseflash.blockmask.walks import walk
from sparseflash.draw.cells import shares
from sparseflash.draw.colours import DEAD_SCORE, EMPTY, FULL, GRID, PARTIAL, colours, hexadecimal
from sparseflash.draw.page_script import SCRIPT
from sparseflash.draw.panels import panels

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask

MOST_PANELS = 16
_CELLS = 512  # a side; 256 if there are several patterns
_MOST_TILES, _MOST_BITS = 200_000, 2**22  # of a page that shows single scores: live tiles, and bytes of distinct tiles


def to_page(mask: BlockMask, title: str = "", *, costs: Iterable[tuple[str, str]] = ()) -> str:
    """A whole HTML document, which needs no network and no other file.

    >>> from sparseflash import masks
    >>> page = to_page(masks.causal(1000), "causal(1000)")
    >>> page.startswith("<!doctype html>") and "http" not in page
    True

    One picture for each distinct pattern, at most `MOST_PANELS`; a cell is a tile, or a square of 2 x 2, 4 x 4, ...
    tiles if there are more than 512 on a side (256, if there are several patterns). Live shares are exact. Up to 1,024
    tokens, and zoomed in, it shows single scores; masks of more than 200,000 live tiles, or 4 MiB of distinct ones,
    show tiles only.

    costs: labels and texts to show beside the pictures, as `sparseflash show` does.
    """
    said = repr(mask.canonical())
    mask = mask.canonical().to("cpu")
    found = panels(mask)
    most = _CELLS if len(found) == 1 else _CELLS // 2
    drawn: list[dict[str, Any]] = []
    tiles = [walk(mask, panel.pattern) for panel in found[:MOST_PANELS]]
    has_scores = sum(len(each.rows) for each in tiles) <= _MOST_TILES and mask.bits.numel() * 4 <= _MOST_BITS
    for panel, own in zip(found, tiles):
        cells = shares(mask, panel.pattern, most, most, lengths=panel.lengths)
        rows, cols = np.nonzero(cells.live)
        rgb = colours(cells.full[rows, cols], cells.partial[rows, cols])
        drawn.append(
            {
                "title": panel.title,
                "rows": cells.live.shape[0],
                "cols": cells.live.shape[1],
                "height": cells.step[0] * mask.block_q,
                "width": cells.step[1] * mask.block_k,
                "at": _packed((rows * cells.live.shape[1] + cols).astype("<u4")),
                "live": _packed(cells.live[rows, cols].astype("<f4")),
                "full": _packed(cells.full[rows, cols].astype("<f4")),
                "rgb": _packed(rgb),
                "ends": list(panel.lengths or (mask.q_len, mask.k_len)),
            }
        )
        if has_scores:
            number = (own.rows * mask.blocks[1] + own.cols).numpy().astype("<u4")
            drawn[-1] |= {"tiles": _packed(number), "kinds": _packed(own.tile.numpy().astype("<u4"))}
    everything: dict[str, Any] = {
        "queries": mask.q_len, "keys": mask.k_len, "block": [mask.block_q, mask.block_k], "panels": drawn,
        "colours": [list(EMPTY), list(DEAD_SCORE), list(PARTIAL), list(FULL)], "grid": GRID,
    }  # fmt: skip
    if has_scores:
        everything["bits"] = _packed(mask.bits.numpy().astype("<i4"))
    rest = f"<p>and {len(found) - MOST_PANELS} more patterns</p>" if len(found) > MOST_PANELS else ""
    data = json.dumps(everything).replace("<", "\\u003c")
    legend = " ".join(
        f'<span style="background:{hexadecimal(colour)}" class="key"></span> {meaning}'
        for colour, meaning in (
            (FULL, "full tiles"), (PARTIAL, "partial tiles"), (EMPTY, "empty; paler: fewer live"),
            *([(DEAD_SCORE, "a dead score of a partial tile")] if has_scores else []),
        )
    )  # fmt: skip
    table = "".join(f"<tr><th>{escape(what)}</th><td>{escape(much)}</td></tr>" for what, much in costs)
    return _PAGE.format(
        title=escape(title or "mask"), summary=escape(said), legend=legend, rest=rest, data=data, grid=GRID,
        costs=f"<table>{table}</table>" if table else "",
        zoom="Wheel: zoom, down to single scores" if has_scores else "Wheel: zoom",
    ).replace("__SCRIPT__", SCRIPT)  # fmt: skip


def _packed(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px system-ui, sans-serif; margin: 1.5em; color: #222; background: #fff; }}
code, h1 {{ overflow-wrap: anywhere; }}
main {{ display: flex; flex-wrap: wrap; gap: 1.5em; align-items: flex-start; }}
figure {{ display: inline-block; margin: 0 1em 1em 0; }}
figcaption {{ text-align: center; }}
#panels {{ max-width: 100%; }}
canvas {{ cursor: crosshair; display: block; touch-action: none; max-width: 100%; }}
table {{ border-collapse: collapse; font-size: 13px; max-width: 34em; }}
th {{ text-align: left; font-weight: normal; color: #666; white-space: nowrap; }}
th, td {{ padding: 0.2em 1em 0.2em 0; vertical-align: top; border-bottom: 1px solid #eee; }}
.key {{ display: inline-block; width: 1em; height: 1em; border: 1px solid {grid}; vertical-align: -0.15em; }}
output {{ display: block; min-height: 1.5em; font-variant-numeric: tabular-nums; }}
</style></head><body>
<h1>{title}</h1><p><code>{summary}</code></p>
<p>{legend}. Queries down, keys right, in tokens. {zoom}; drag: move; double click: all.</p>
<output id="said">Point at a cell.</output>
<main><div id="panels"></div>{costs}</main>{rest}
<script type="application/json" id="data">{data}</script>
<script>__SCRIPT__</script>
</body></html>
"""
