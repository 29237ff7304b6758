"""Vectors as images: on the CPU with numba, or on any device with PyTorch. Both give the same bits."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from experiments.pathfinder.compiled import compiled
from experiments.pathfinder.parameters import Parameters
from experiments.pathfinder.snakes import merge
from experiments.pathfinder.stamps import markers
from experiments.pathfinder.tables import lines
from experiments.pathfinder.vectors import Vectors

if TYPE_CHECKING:
    import torch


def render(vectors: Vectors, first: int = 0, last: int | None = None) -> NDArray[np.uint8]:
    """Images first .. last - 1, by default all. uint8 [n, size, size]

    As in the release, the brightest pixel of every image is 255: at 32 pixels that is a distractor's, elsewhere a
    marker's edge.
    """
    p = vectors.parameters
    chosen = range(len(vectors))[first:last]
    images = np.empty((len(chosen), p.size, p.size), np.uint8)
    discs = markers(p.size, p.marker_radius)
    centres = vectors.markers[first:last]
    for image, index, ends in zip(images, chosen, centres):
        dashes = slice(vectors.starts[index], vectors.starts[index + 1])
        stamps = lines(p, int(vectors.margins[index]))
        compose(image, vectors.places[dashes], vectors.headings[dashes], 2 * p.contour_length, stamps, ends, discs)
    return images


@compiled
def compose(image, places, headings, targets, stamps, centres, discs):
    """Draw one image. image: uint8 [size, size], overwritten; for the others see `render`"""
    size, width = len(image), discs.shape[0]
    canvas = np.zeros((size, size), np.int16)  # 0 remains somewhere, so that the darkest pixel need not be sought
    for dash in range(len(headings)):
        y, x = np.int64(places[dash, 0]), np.int64(places[dash, 1])
        merge(canvas, y, x, stamps[0 if dash < targets else 1, headings[dash]])
    for marker in range(2):
        top = window_start(centres[marker, 0], size, width)
        left = window_start(centres[marker, 1], size, width)
        disc = discs[centres[marker, 0] - top, centres[marker, 1] - left]
        for y in range(width):
            for x in range(width):
                canvas[top + y, left + x] = max(canvas[top + y, left + x], disc[y, x])
    greatest = np.int64(0)
    for y in range(size):
        for x in range(size):
            greatest = max(greatest, np.int64(canvas[y, x]))
    for y in range(size):
        for x in range(size):
            # 255 * canvas / greatest, halves rounded up
            image[y, x] = (510 * np.int64(canvas[y, x]) + greatest) // (2 * greatest)


@compiled
def window_start(centre, size, width):
    """Where the window of a marker begins, along one axis: around its centre, but within the image."""
    return min(max(centre - width // 2, 0), size - width)


class DeviceRenderer:
    """Renders batches on a device from vectors that lie there.

    A canvas has a border as wide as a stamp's half, so that no stamp need be cut.
    """

    def __init__(self, vectors: Vectors, device: str | torch.device) -> None:
        import torch

        p = vectors.parameters
        self.vectors, self.device = vectors, torch.device(device)
        self.size, self.targets = p.size, 2 * p.contour_length
        self.stamps, self.first_stamp = (self._to(array) for array in flat_stamps(p))
        self.discs = self._to(markers(p.size, p.marker_radius))
        self.places, self.headings = self._to(vectors.places), self._to(vectors.headings.astype(np.int32))
        self.starts, self.margins = self._to(vectors.starts), self._to(vectors.margins)
        self.centres = self._to(vectors.markers)

    def _to(self, array: NDArray[np.generic]) -> torch.Tensor:
        import torch

        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        """Images of the given numbers, int64 [n]. uint8 [n, size, size], on the device"""
        import torch

        indices = indices.to(self.device)
        counts = self.starts[indices + 1] - self.starts[indices]
        image = torch.repeat_interleave(torch.arange(len(indices), device=self.device), counts)  # [d], of every dash
        number = torch.arange(len(image), device=self.device) - (counts.cumsum(0) - counts)[image]
        dash = self.starts[indices][image] + number
        kind = (number >= self.targets).long()
        stamp = self.first_stamp[self.margins[indices].long()][image, kind] + self.headings[dash]

        radius = self.stamps.shape[-1] // 2
        side = self.size + 2 * radius
        canvas = torch.zeros(len(indices) * side * side, dtype=torch.int32, device=self.device)
        within = self._square(2 * radius + 1, side)
        place = self.places[dash].long()
        corner = (image * side + place[:, 0]) * side + place[:, 1]
        where = (corner[:, None] + within).flatten()
        canvas.scatter_reduce_(0, where, self.stamps[stamp].flatten().int(), "amax")
        canvas = canvas.view(-1, side, side)[:, radius : side - radius, radius : side - radius].flatten()

        width = self.discs.shape[0]
        centre = self.centres[indices]  # [n, 2, 2]
        start = (centre - width // 2).clamp(0, self.size - width)
        offset = centre - start
        discs = self.discs[offset[..., 0], offset[..., 1]]  # [n, 2, width, width]
        number = torch.arange(len(indices), device=self.device)[:, None]
        corner = (number * self.size + start[..., 0]) * self.size + start[..., 1]
        where = (corner[..., None] + self._square(width, self.size)).flatten()
        canvas = canvas.scatter_reduce(0, where, discs.flatten().int(), "amax").view(-1, self.size, self.size)
        greatest = canvas.amax((1, 2), keepdim=True)
        return ((510 * canvas + greatest) // (2 * greatest)).to(torch.uint8)

    def _square(self, width: int, side: int) -> torch.Tensor:
        """The pixels of a square, as offsets from its corner in a flattened canvas. int64 [width * width]"""
        import torch

        along = torch.arange(width, device=self.device)
        return (along[:, None] * side + along).flatten()


@lru_cache(maxsize=4)
def flat_stamps(parameters: Parameters) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The lines of all margins one after another, and where those of each margin begin.

    int16 [s, n, n], n the largest margin's; int64 [256, 2]: by margin, then targets or distractors
    """
    all_lines = {margin: lines(parameters, margin) for margin in sorted(set(parameters.margins))}
    side = max(stamps.shape[-1] for stamps in all_lines.values())
    found, first = [], np.zeros((256, 2), np.int64)
    begin = 0
    for margin, stamps in all_lines.items():
        missing = (side - stamps.shape[-1]) // 2
        found.append(np.pad(stamps, ((0, 0), (0, 0), (missing, missing), (missing, missing))).reshape(-1, side, side))
        first[margin] = begin, begin + stamps.shape[1]
        begin += 2 * stamps.shape[1]
    return np.concatenate(found), first
