"""Stored results of `SmallCNN` by kind of images: experiments/results/pathfinder/cnn-pathfinder32-cl14.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.training.reading import read_json

STORED = Path(__file__).parents[2] / "results" / "pathfinder"
RULE = "small 2-D CNN"

Figure = dict[str, Any]


def stored(name: str, folder: Path | None = None) -> Figure | None:
    path = (STORED if folder is None else folder) / f"cnn-{name}.json"
    if not path.is_file():
        return None
    return read_json(path, "the result of a network")


def as_rule(figure: Figure) -> Figure:
    kept = {name: figure[name] for name in ("rule", "accuracy", "error", "images")}
    return kept | {"by_distance": figure["by_distance"]["accuracy"]}
