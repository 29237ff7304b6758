from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.pathfinder.bins import by_distance
from experiments.pathfinder.cnn.config import Config
from experiments.pathfinder.cnn.images import Batch, fresh, repeated
from experiments.pathfinder.cnn.results import RULE, Figure
from experiments.pathfinder.cnn.train import Training, answers
from experiments.pathfinder.parameters import Parameters
from experiments.pathfinder.seeds import TEST_SEED
from experiments.pathfinder.vectors import Vectors, load
from experiments.training.environment import command_line, device_name, versions
from experiments.training.fingerprint import sha256
from experiments.training.prefetch import Prefetcher
from experiments.training.run_log import Record
from experiments.training.workers import available_cores


@dataclass(frozen=True)
class Source:
    parameters: Parameters
    vectors: Vectors | None = None
    name: str = "fresh images"

    @classmethod
    def of_file(cls, path: Path) -> Source:
        vectors = load(path)
        if vectors.seed == TEST_SEED:
            raise ValueError(f"{path} must hold other images than a test set's; its seed, {TEST_SEED}, is theirs")
        return cls(vectors.parameters, vectors, path.name)

    def batches(self, config: Config, prefetcher: Prefetcher, device: torch.device) -> Generator[Batch, None, None]:
        if self.vectors is None:
            return fresh(self.parameters, config.seed, config.batch, prefetcher, device)
        return repeated(self.vectors, config.seed, config.batch, device)


def train(
    training: Training,
    source: Source,
    workers: int | None,
    report: Callable[[Record], None] = lambda record: None,
) -> None:
    """workers: processes that draw fresh images; 0: none; by default all cores but one."""
    with (
        Prefetcher(workers if source.vectors is None else 0) as prefetcher,
        closing(source.batches(training.config, prefetcher, training.device)) as batches,
    ):
        if training.device.type == "cpu":
            # Threads that share cores with the drawing processes wait for each other.
            torch.set_num_threads(max(1, min(torch.get_num_threads(), available_cores() - prefetcher.workers)))
        training.train(batches, report)


def tested(training: Training, source: Source, file: Path) -> Figure:
    vectors = load(file)
    right, loss = answers(training.model, vectors, training.config, training.device)
    config, parameters = training.config, source.parameters
    return {
        "rule": RULE,
        "images_of": parameters.name,
        "size": parameters.size,
        "contour": parameters.contour_length,
        **accuracy(right),
        "loss": loss,
        "connected": float(vectors.labels.mean()),
        "test_set": file.name,
        "test_set_sha256": sha256(file),
        "by_distance": by_distance(vectors, right),
        "trained_on": source.name,
        "weights": sum(weight.numel() for weight in training.model.parameters()),
        "config": asdict(config),
        "cost": {
            "steps": training.step,
            "images": training.step * config.batch,
            "different_images": training.step * config.batch if source.vectors is None else len(source.vectors),
            "seconds": training.seconds,
            "images_per_s": training.step * config.batch / training.seconds,
        },
        "last_training": training.last,
        "device": device_name(training.device),
        "cores": available_cores(),
        "versions": versions() | {name: version(name) for name in ("numba", "pillow", "scikit-learn")},
        "command": command_line("experiments.pathfinder"),
    }


def accuracy(right: NDArray[np.bool_]) -> dict[str, float | int]:
    part = float(right.mean())
    return {"accuracy": part, "error": math.sqrt(part * (1 - part) / len(right)), "images": len(right)}
