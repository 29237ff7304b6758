from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments.measurements import Measurement, slug
from experiments.pathfinder.cnn.results import stored
from experiments.pathfinder.parameters import parameters_of
from experiments.pathfinder.testset import IMAGES, title
from experiments.pathfinder.vectors import Vectors
from experiments.pathfinder.vectors import load as load_vectors
from experiments.pathx import weights
from experiments.pathx.config import Config, Stage, distinct_drawings
from experiments.pathx.data.batches import Recipe, batches_of, pack_vectors, recipe_of
from experiments.pathx.data.packing import Packed
from experiments.pathx.data.stream import Stream
from experiments.pathx.scoring import Scores, score, standard_error
from experiments.pathx.supervision import of_model
from experiments.training.atomic_files import write_json
from experiments.training.environment import device_name, versions
from experiments.training.fingerprint import sha256

LRA_CONTOUR = 14  # of the arena's tasks
TASKS = {128: "path-x", 256: "path-256", 512: "path-512"}
SIGMAS = 3.0  # from a stored accuracy, in standard errors


def stage_for(config: Config, size: int | None, contour: int | None) -> Stage:
    last = config.curriculum[-1]
    size = size or last.size
    same = [stage for stage in config.curriculum if stage.size == size]
    chosen = same[-1] if same else last
    return replace(chosen, size=size, contour=contour or last.contour, also=())


def recipe_for(config: Config, stage: Stage) -> Recipe:
    return replace(recipe_of(replace(config, curriculum=(stage,)), 0), pixel_labels=False, hidden=0.0)


def pack_from_file(recipe: Recipe, file: Path, first: int, last: int) -> Packed:
    return pack_vectors(recipe, vectors_of(file), first, last)


@lru_cache(maxsize=2)
def vectors_of(file: Path) -> Vectors:
    return load_vectors(file)


@dataclass(frozen=True)
class Evaluation:
    model: nn.Module
    config: Config
    stage: Stage
    stream: Stream
    device: torch.device

    def scores(
        self,
        pack: Callable[..., Packed],
        *source: Any,
        images: int,
        progress: Callable[[int], None] = lambda images: None,
    ) -> Scores:
        recipe = recipe_for(self.config, self.stage)
        self.model.to(self.device)
        batches = self.stream.in_order(pack, ((recipe, *source, *ends) for ends in batches_of(recipe, images)))
        return score(self.model, batches, recipe.layers, self.config, self.device, progress)

    def result(self, scores: Scores, file: Path | None, task: str | None = None) -> dict[str, Any]:
        """With the standard error. file: the test set; None for released images, which `task` names."""
        stage, config = self.stage, self.config
        count = len(scores.labels)
        return {
            "task": task or title(stage.size, stage.contour),
            "background": stage.background,
            "model": config.model,
            "layers": (stage.layers or config.layers) if config.model == "attention" else None,
            "floor": config.floor,
            "positions": config.positions if config.model == "attention" else None,
            "training_images": training_images(config),
            "renderings": "drawn" if config.renderings else "one",
            "strokes": config.strokes,
            "accuracy": scores.accuracy,
            "error": standard_error(scores.accuracy, count),
            "loss": scores.loss,
            "images": count,
            "connected": float((scores.labels == 1).double().mean()),
            "test_set_sha256": None if file is None else sha256(file),
            "precision": config.precision,
            "device": device_name(self.device),
            "versions": versions(),
        }


def trained_as(stage: Stage, config: Config, about: dict[str, Any]) -> tuple[str, str, str]:
    task = TASKS.get(stage.size, f"{stage.size}-pixels") + ("" if stage.contour == LRA_CONTOUR else f"-{stage.contour}")
    labels = "pixel-labels" if of_model(about)["labels"] != 0.0 else "labels-alone"
    way = slug((stage.layers or config.layers).replace(",", " ")) if config.model == "attention" else config.model
    return task, labels if config.renderings else f"{labels}-one-rendering", way


def measurements_of(found: dict[str, Any], cost: dict[str, Any], named: tuple[str, str, str]) -> list[Measurement]:
    task, where, way = named
    cost_of = {"minutes": (cost["minutes"], "minutes"), "images": (cost["images"] / 1e6, "million images")}
    return [
        accuracy_of(f"pathx/{task}/accuracy/{where}/{way}", found),
        *(
            Measurement(f"pathx/{task}/{what}/{where}/{way}", value, None, unit)
            for what, (value, unit) in cost_of.items()
        ),
    ]


def accuracy_of(name: str, found: dict[str, Any]) -> Measurement:
    """Its spread is the standard error until there are several seeds."""
    settings = {"images": found["images"], "spread": "standard error of one run's test"}
    return Measurement(name, 100 * found["accuracy"], found["error"] / found["accuracy"], "%", settings)


def training_images(config: Config) -> str:
    if config.release is not None:
        return "a release's"
    fixed = tuple(stage for stage in config.curriculum if stage.images is not None)
    if not fixed:
        return "fresh"
    return ("fresh, then " if len(fixed) < len(config.curriculum) else "") + f"{distinct_drawings(fixed):,} drawings"


def baselines(stage: Stage) -> str:
    cnn = stored(parameters_of(stage.size, stage.contour).name)
    if cnn is None:
        return ""
    return ", ".join(f"{each['rule']} {100 * each['accuracy']:.1f} %" for each in [*cnn["by_distance"]["rules"], cnn])


def key_of(stage: Stage) -> str:
    return f"{stage.size}-{stage.contour}-{stage.background}"


def store(path: Path, stage: Stage, found: dict[str, Any]) -> None:
    if found["images"] != IMAGES:
        raise ValueError(f"only results of all {IMAGES} images are stored; this one is of {found['images']}")
    note = weights.beside(path)
    note["results"][key_of(stage)] = found
    write_json(path.with_suffix(".json"), note)


def agrees(found: dict[str, Any], stored: dict[str, Any]) -> bool:
    error = standard_error(stored["accuracy"], found["images"])
    return abs(found["accuracy"] - stored["accuracy"]) <= SIGMAS * error
