"""Generated images above real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from experiments.pathfinder.released import grey_png
from experiments.pathfinder.render import render
from experiments.pathfinder.vectors import Vectors

GAP = 2  # around every tile
LINE = 16


def strip(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    n, size, _ = images.shape
    found = np.full((size + 2 * GAP, n * (size + GAP) + GAP), 255, np.uint8)
    for number, image in enumerate(images):
        left = GAP + number * (size + GAP)
        found[GAP : GAP + size, left : left + size] = image
    return found


def picture(vectors: Vectors, path: Path, *, real: Path | None = None, tiles: int = 8, enlarge: int = 1) -> None:
    first = render(vectors, 0, 200)
    connected, apart = (first[vectors.labels[:200] == label][: tiles // 2] for label in (1, 0))
    ours = strip(np.concatenate([connected, apart]))
    rows = [(f"generated, {vectors.parameters.name}, seed {vectors.seed}: {len(connected)} connected, rest not", ours)]
    if real is not None:
        theirs = grey_png(real, ours.shape[1], ours.shape[0])
        rows.append(("released images of the Long Range Arena, their labels unknown here", theirs))
    height, width = ours.shape
    page = Image.new("L", (enlarge * width, len(rows) * (enlarge * height + LINE)), 255)
    draw = ImageDraw.Draw(page)
    for number, (title, row) in enumerate(rows):
        top = number * (enlarge * height + LINE)
        draw.text((GAP, top + 2), title, fill=0)
        enlarged = Image.fromarray(row).resize((enlarge * width, enlarge * height), Image.Resampling.NEAREST)
        page.paste(enlarged, (0, top + LINE))
    path.parent.mkdir(parents=True, exist_ok=True)
    page.save(path, optimize=True)
