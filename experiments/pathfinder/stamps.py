"""The small pictures that compose an image: lines, their surroundings, markers.

Every picture is drawn at twice the resolution and halved with a Lanczos filter. Values overshoot a little, as in the
release. They are integers, so that images are equal on every CPU.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy.ndimage import binary_dilation

from experiments.pathfinder.geometry import disc, move

UNIT = 8192  # 1.0; the largest contrast, 2 with 20 % overshoot, fits into 16 bits
FINER = 2  # "antialias_scale"
LANCZOS_REACH = 3  # pixels over which a value spreads


@lru_cache(maxsize=4096)
def dash(angle: float, length: int, thickness: float, margin: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """From the middle of a picture, and the area within a margin of it.

    Both float64 [n, n], n = 2 * (length + ceil(thickness) + margin) + 1, in 0..1 except for the overshoot.
    """
    radius = length + ceil(thickness) + margin
    side, middle = 2 * radius + 1, FINER * radius
    drawing = Image.new("F", (FINER * (side - 1) + 1,) * 2, 0)
    end_y, end_x = np.ceil(middle + move(np.float64(angle), FINER * length))
    ends = [(middle, middle), (int(end_x), int(end_y))]
    ImageDraw.Draw(drawing).line(ends, fill=255, width=round(FINER * thickness))
    line = np.asarray(drawing)
    area = np.where(binary_dilation(line > 0, disc(FINER * margin)), np.float32(255), np.float32(0))
    return shrink(line, side), shrink(area, side)


def shrink(drawing: NDArray[np.float32], side: int) -> NDArray[np.float64]:
    return np.asarray(Image.fromarray(drawing).resize((side, side), Image.Resampling.LANCZOS), np.float64) / 255


def quantise(picture: NDArray[np.float64]) -> NDArray[np.int16]:
    if picture.max() * UNIT > np.iinfo(np.int16).max:
        raise ValueError(f"a contrast must be at most 3; got a picture of brightness {picture.max():.1f}")
    return np.rint(picture * UNIT).astype(np.int16)


@lru_cache(maxsize=16)
def markers(size: int, marker_radius: float) -> NDArray[np.int16]:
    """Markers for every position in an image. int16 [w, w, w, w]: y and x of the centre in the window, then the window

    The window stays inside the image, because the filter gives remaining pixels more weight at the border.
    """
    width = marker_window(size, marker_radius)
    pictures = np.empty((width, width, width, width), np.int16)
    y, x = np.mgrid[: FINER * width, : FINER * width]
    for centre_y in range(width):
        for centre_x in range(width):
            inside = (y - FINER * centre_y) ** 2 + (x - FINER * centre_x) ** 2 <= (FINER * marker_radius) ** 2
            pictures[centre_y, centre_x] = quantise(shrink(np.where(inside, np.float32(255), np.float32(0)), width))
    return pictures


def marker_window(size: int, marker_radius: float) -> int:
    return min(size, 2 * (ceil(marker_radius) + 2 * LANCZOS_REACH + 1) + 1)
