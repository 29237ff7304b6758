"""The stored figures of networks, one small file a kind of images: baselines to tell other results beside.

experiments/results/pathfinder/cnn-pathfinder32-cl14.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.training.atomic_files import write_json

STORED = Path(__file__).parents[2] / "results" / "pathfinder"
RULE = "small 2-D CNN"  # what tables of baselines call it

Figure = dict[str, Any]  # plain values, see run.py


def path_of(name: str, folder: Path) -> Path:
    """Where the figure for a kind of images lies; name: that of its parameters."""
    return folder / f"cnn-{name}.json"


def write(figure: Figure, folder: Path) -> Path:
    """Write a figure, in place of an earlier one of the same kind of images."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(figure["images_of"], folder)
    write_json(path, figure)
    return path


def stored(name: str, folder: Path | None = None) -> Figure | None:
    """The figure for a kind of images, by default the one that ships with the repository; None where there is none."""
    path = path_of(name, STORED if folder is None else folder)
    if not path.is_file():
        return None
    figure: Figure = json.loads(path.read_text())
    return figure


def as_rule(figure: Figure) -> Figure:
    """What tables of rules tell of a figure; as `experiments.pathfinder.bins.by_distance` has its rules."""
    kept = {name: figure[name] for name in ("rule", "accuracy", "error", "images")}
    return kept | {"by_distance": figure["by_distance"]["accuracy"]}


def all_in(folder: Path) -> list[Figure]:
    """All figures of a folder, by size, then contour length."""
    figures = [json.loads(path.read_text()) for path in folder.glob(path_of("*", folder).name)]
    return sorted(figures, key=lambda figure: (figure["size"], figure["contour"], figure["images_of"]))
