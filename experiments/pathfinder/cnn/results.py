"""Stored results of networks.

experiments/results/pathfinder/cnn-pathfinder32-cl14.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.training.atomic_files import write_json
from experiments.training.reading import read_json

STORED = Path(__file__).parents[2] / "results" / "pathfinder"
RULE = "small 2-D CNN"

Figure = dict[str, Any]


def path_of(name: str, folder: Path) -> Path:
    return folder / f"cnn-{name}.json"


def write(figure: Figure, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(figure["images_of"], folder)
    write_json(path, figure)
    return path


def stored(name: str, folder: Path | None = None) -> Figure | None:
    path = path_of(name, STORED if folder is None else folder)
    if not path.is_file():
        return None
    return read_json(path, "the result of a network")


def as_rule(figure: Figure) -> Figure:
    kept = {name: figure[name] for name in ("rule", "accuracy", "error", "images")}
    return kept | {"by_distance": figure["by_distance"]["accuracy"]}


def all_in(folder: Path) -> list[Figure]:
    figures = [
        read_json(path, "the result of a network", "size", "contour", "images_of")
        for path in folder.glob(path_of("*", folder).name)
    ]
    return sorted(figures, key=lambda figure: (figure["size"], figure["contour"], figure["images_of"]))
