"""Writes a file of images on all cores. A stopped run resumes.

<parent>/pathfinder128-cl14-generated-200000-seed0.safetensors
<parent>/pathfinder128-cl14-generated-200000-seed0.unfinished/     its parts, until the file is complete
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path

from experiments.pathfinder.draw import draw
from experiments.pathfinder.parameters import Parameters
from experiments.pathfinder.vectors import collect, join, load, save
from experiments.training.workers import available_cores, worker_pool

IMAGES_PER_PART = 500  # 2 to 15 seconds of work


@dataclass(frozen=True)
class Settings:
    """Files with equal parameters and seed begin with the same images."""

    parameters: Parameters
    images: int = 200_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.images < 1:
            raise ValueError(f"images must be at least 1; got {self.images}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to 2^63 - 1; got {self.seed}")

    @property
    def name(self) -> str:
        return f"{self.parameters.name}-generated-{self.images}-seed{self.seed}"


def generate(
    settings: Settings, parent: Path, *, workers: int | None = None, progress: Callable[[int], None] = lambda done: None
) -> Path:
    """Write the file below `parent` and return its path.

    workers: by default one for each core; the file does not depend on it. progress: called with the number of drawn
    images.
    """
    path = parent / f"{settings.name}.safetensors"
    if path.exists():
        return path
    unfinished = parent / f"{settings.name}.unfinished"
    unfinished.mkdir(parents=True, exist_ok=True)
    parts = {
        first: unfinished / f"part-{first:09d}.safetensors" for first in range(0, settings.images, IMAGES_PER_PART)
    }
    sizes = {first: min(IMAGES_PER_PART, settings.images - first) for first in parts}
    missing = [first for first in parts if not parts[first].exists()]
    done = settings.images - sum(sizes[first] for first in missing)
    progress(done)
    workers = min(workers or available_cores(), len(missing))
    if workers <= 1:
        for first in missing:
            draw_part(settings, first, sizes[first], parts[first])
            done += sizes[first]
            progress(done)
    else:
        with worker_pool(workers) as pool:
            futures = {pool.submit(draw_part, settings, first, sizes[first], parts[first]): first for first in missing}
            try:
                for future in as_completed(futures):
                    future.result()
                    done += sizes[futures[future]]
                    progress(done)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    save(join([load(part) for part in parts.values()]), path)
    shutil.rmtree(unfinished)
    return path


def draw_part(settings: Settings, first: int, images: int, path: Path) -> None:
    drawings = [draw(settings.parameters, settings.seed, index) for index in range(first, first + images)]
    save(collect(settings.parameters, settings.seed, drawings), path)
