"""Renders vectors in batches on any PyTorch device, in integers: the same bits as in render.py."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.pathfinder.parameters import Parameters
from experiments.pathfinder.stamps import UNIT, markers
from experiments.pathfinder.tables import lines
from experiments.pathfinder.vectors import Vectors


class DeviceRenderer:
    """With one copy of the vectors on the device.

    >>> from experiments.pathfinder.draw import draw
    >>> from experiments.pathfinder.parameters import lra
    >>> from experiments.pathfinder.vectors import collect
    >>> parameters = lra(32, 6)
    >>> renderer = DeviceRenderer(collect(parameters, 0, [draw(parameters, 0, index) for index in range(5)]), "cpu")
    >>> renderer(torch.tensor([4, 0])).shape
    torch.Size([2, 32, 32])
    """

    def __init__(self, vectors: Vectors, device: str | torch.device) -> None:
        p = vectors.parameters
        self.size, self.targets = p.size, 2 * p.contour_length
        self.device = torch.device(device)
        self.stamps, self.first_stamp = (self._to(array) for array in all_lines(p))
        self.discs = self._to(markers(p.size, p.marker_radius))
        self.places = self._to(vectors.places if vectors.places.dtype == np.uint8 else vectors.places.astype(np.int32))
        self.headings = self._to(vectors.headings.astype(np.int32))
        self.starts, self.margins = self._to(vectors.starts), self._to(vectors.margins.astype(np.int64))
        self.centres = self._to(vectors.markers)

    def _to(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)

    def __call__(self, indices: Tensor) -> Tensor:
        indices = indices.to(self.device)
        canvas = self._draw_lines(indices)
        brightest = canvas.amax((1, 2))  # [n]
        canvas = self._add_markers(UNIT * canvas, indices, brightest)
        return (255 * canvas // canvas.amax((1, 2), keepdim=True)).to(torch.uint8)

    def _draw_lines(self, indices: Tensor) -> Tensor:
        counts = self.starts[indices + 1] - self.starts[indices]
        image = torch.repeat_interleave(counts)
        number = torch.arange(len(image), device=self.device) - (counts.cumsum(0) - counts)[image]
        dash = self.starts[indices][image] + number
        kind = (number >= self.targets).long()
        stamp = self.first_stamp[self.margins[indices][image], kind] + self.headings[dash]

        radius = self.stamps.shape[-1] // 2
        side = self.size + 2 * radius
        place = self.places[dash].long()
        corner = (image * side + place[:, 0]) * side + place[:, 1]
        where = corner[:, None] + self._square(2 * radius + 1, side)
        canvas = torch.zeros(len(indices) * side * side, dtype=torch.int32, device=self.device)
        canvas.scatter_reduce_(0, where.flatten(), self.stamps[stamp].flatten().int(), "amax")
        return canvas.view(-1, side, side)[:, radius : side - radius, radius : side - radius].long()

    def _add_markers(self, canvas: Tensor, indices: Tensor, brightness: Tensor) -> Tensor:
        width = self.discs.shape[0]
        centre = self.centres[indices]  # [n, 2, (y, x)]
        start = (centre - width // 2).clamp(0, self.size - width)
        inside = centre - start
        discs = self.discs[inside[..., 0], inside[..., 1]] * brightness[:, None, None, None]  # [n, 2, width, width]
        number = torch.arange(len(indices), device=self.device)[:, None]
        corner = (number * self.size + start[..., 0]) * self.size + start[..., 1]
        where = corner[..., None] + self._square(width, self.size)
        return canvas.flatten().scatter_reduce(0, where.flatten(), discs.flatten(), "amax").view_as(canvas)

    def _square(self, width: int, side: int) -> Tensor:
        along = torch.arange(width, device=self.device)
        return (along[:, None] * side + along).flatten()


@lru_cache(maxsize=4)
def all_lines(parameters: Parameters) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The lines of all margins, int16 [s, n, n], and where each begins, int64 [256, 2]: by margin, then targets or
    distractors."""
    of_margin = {margin: lines(parameters, margin) for margin in sorted(set(parameters.margins))}
    side = max(stamps.shape[-1] for stamps in of_margin.values())
    found, first = [], np.zeros((256, 2), np.int64)
    begin = 0
    for margin, stamps in of_margin.items():
        missing = (side - stamps.shape[-1]) // 2
        found.append(np.pad(stamps, ((0, 0), (0, 0), (missing, missing), (missing, missing))).reshape(-1, side, side))
        first[margin] = begin, begin + stamps.shape[1]
        begin += 2 * stamps.shape[1]
    return np.concatenate(found), first
