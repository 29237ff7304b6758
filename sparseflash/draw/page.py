"""A mask as a page of its own for a browser: zoom with the wheel, move by dragging, hover for the live share."""

from __future__ import annotations

import base64
import json
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from sparseflash.draw.cells import shares
from sparseflash.draw.colours import EMPTY, FULL, GRID, PARTIAL, colours, hexadecimal
from sparseflash.draw.panels import panels

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask

MOST_PANELS = 16
_CELLS = 512  # a side; 256 if there are several patterns


def to_page(mask: BlockMask, title: str = "") -> str:
    """A whole HTML document, which needs no network and no other file.

    >>> from sparseflash import masks
    >>> page = to_page(masks.causal(1000), "causal(1000)")
    >>> page.startswith("<!doctype html>") and "http" not in page
    True

    One picture for each distinct pattern, at most `MOST_PANELS`; a cell is a tile, or a square of 2 x 2, 4 x 4, ...
    tiles if there are more than 512 on a side (256, if there are several patterns). Live shares are exact.
    """
    mask = mask.canonical()
    found = panels(mask)
    most = _CELLS if len(found) == 1 else _CELLS // 2
    drawn: list[dict[str, Any]] = []
    for panel in found[:MOST_PANELS]:
        cells = shares(mask, panel.pattern, most, most, lengths=panel.lengths)
        rows, cols = np.nonzero(cells.live)
        rgb = colours(cells.full[rows, cols], cells.partial[rows, cols])
        drawn.append(
            {
                "title": panel.title,
                "rows": cells.live.shape[0],
                "cols": cells.live.shape[1],
                "height": cells.step[0] * mask.block_q,  # tokens of a cell
                "width": cells.step[1] * mask.block_k,
                "at": _packed((rows * cells.live.shape[1] + cols).astype("<u4")),
                "live": _packed(cells.live[rows, cols].astype("<f4")),
                "full": _packed(cells.full[rows, cols].astype("<f4")),
                "rgb": _packed(rgb),
            }
        )
    rest = f"<p>and {len(found) - MOST_PANELS} more patterns</p>" if len(found) > MOST_PANELS else ""
    data = json.dumps({"queries": mask.q_len, "keys": mask.k_len, "panels": drawn}).replace("<", "\\u003c")
    legend = " ".join(
        f'<span style="background:{hexadecimal(colour)}" class="key"></span> {meaning}'
        for colour, meaning in ((FULL, "full tiles"), (PARTIAL, "partial tiles"), (EMPTY, "empty"))
    )
    return _PAGE.format(
        title=escape(title or "mask"), summary=escape(repr(mask)), legend=legend, rest=rest, data=data, grid=GRID
    ).replace("__SCRIPT__", _SCRIPT)


def _packed(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px system-ui, sans-serif; margin: 1.5em; color: #222; }}
code {{ overflow-wrap: anywhere; }}
figure {{ display: inline-block; margin: 0 1em 1em 0; }}
canvas {{ border: 1px solid {grid}; cursor: crosshair; display: block; touch-action: none; max-width: 100%; }}
.key {{ display: inline-block; width: 1em; height: 1em; border: 1px solid {grid}; vertical-align: -0.15em; }}
output {{ display: block; min-height: 1.5em; font-variant-numeric: tabular-nums; }}
</style></head><body>
<h1>{title}</h1><p><code>{summary}</code></p>
<p>{legend}; paler: fewer live. Queries down, keys right. Wheel: zoom; drag: move; double click: all.</p>
<output id="said">Point at a cell.</output>
<div id="panels"></div>{rest}
<script type="application/json" id="data">{data}</script>
<script>__SCRIPT__</script>
</body></html>
"""

_SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const said = document.getElementById("said");
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer;
const range = (cell, size, total) => cell * size + "\\u2013" + (Math.min((cell + 1) * size, total) - 1);
const percent = share => (100 * share).toPrecision(4).replace(/\\.?0+$/, "") + " %";
for (const panel of data.panels) {
  const at = new Uint32Array(bytes(panel.at)), live = new Float32Array(bytes(panel.live));
  const full = new Float32Array(bytes(panel.full)), rgb = new Uint8Array(bytes(panel.rgb));
  const where = new Map();
  at.forEach((cell, i) => where.set(cell, i));
  const source = document.createElement("canvas");
  source.width = panel.cols; source.height = panel.rows;
  const image = new ImageData(panel.cols, panel.rows);
  image.data.fill(255);
  at.forEach((cell, i) => image.data.set(rgb.subarray(3 * i, 3 * i + 3), 4 * cell));
  source.getContext("2d").putImageData(image, 0, 0);
  const figure = document.createElement("figure"), canvas = document.createElement("canvas");
  const caption = document.createElement("figcaption");
  caption.textContent = panel.title;
  figure.append(canvas, caption);
  document.getElementById("panels").append(figure);
  const side = data.panels.length > 1 ? 420 : 720, longest = Math.max(data.queries, data.keys);
  canvas.width = Math.max(16, side * data.keys / longest);
  canvas.height = Math.max(16, side * data.queries / longest);
  // The part that is shown, in cells; the last cells may be cut by the end of the mask.
  const all = { x: 0, y: 0, w: data.keys / panel.width, h: data.queries / panel.height };
  let view = { ...all };
  const draw = () => {
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(source, view.x, view.y, view.w, view.h, 0, 0, canvas.width, canvas.height);
  };
  const place = event => {
    const box = canvas.getBoundingClientRect();
    return { x: (event.clientX - box.left) / box.width, y: (event.clientY - box.top) / box.height };
  };
  const move = (x, y) => {
    view.x = Math.min(Math.max(0, x), all.w - view.w);
    view.y = Math.min(Math.max(0, y), all.h - view.h);
    draw();
  };
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    const p = place(event), x = view.x + p.x * view.w, y = view.y + p.y * view.h;
    const least = Math.min(1, 4 / Math.max(all.w, all.h));
    const scale = Math.min(1, Math.max(least, view.w / all.w * Math.exp(event.deltaY / 400)));
    view.w = all.w * scale; view.h = all.h * scale;
    move(x - p.x * view.w, y - p.y * view.h);
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", event => {
    held = { ...place(event), from: { ...view } };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("dblclick", () => { view = { ...all }; draw(); });
  canvas.addEventListener("pointermove", event => {
    const p = place(event);
    if (held) move(held.from.x - (p.x - held.x) * view.w, held.from.y - (p.y - held.y) * view.h);
    const col = Math.floor(view.x + p.x * view.w), row = Math.floor(view.y + p.y * view.h);
    if (col < 0 || row < 0 || col >= panel.cols || row >= panel.rows) return;
    const i = where.get(row * panel.cols + col);
    const share = i === undefined ? 0 : live[i], whole = i === undefined ? 0 : full[i];
    const kind = share === 0 ? "empty" : whole >= share ? "full tiles"
      : whole === 0 ? "partial tiles" : "full and partial tiles";
    said.textContent = "queries " + range(row, panel.height, data.queries) + ", keys "
      + range(col, panel.width, data.keys) + ": " + percent(share) + " live, " + kind;
  });
  draw();
}
"""
