"""The models of the five tasks with each implementation, and batches of their shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.lra.config import Config, configure
from experiments.lra.data.batches import Batch, collate
from experiments.lra.data.examples import Examples
from experiments.lra.tasks import TASKS

# The five tasks of the paper's mean.
FIVE = ("listops", "text", "retrieval", "image", "pathfinder32")

# The implementation of attention, and the mask, of each variant.
VARIANTS = {
    "standard": ("standard", "dense"),
    "sdpa": ("sdpa", "dense"),
    "dense": ("sparseflash", "dense"),
    "butterfly": ("sparseflash", "butterfly"),
    "local": ("sparseflash", "local"),
}
REFERENCE = "standard"

# Small enough for a second on a CPU: tests the benchmark, measures nothing.
SMALL = {
    "max_tokens": 60, "block": 16, "window": 16, "batch": 2, "depth": 1, "width": 32, "head_dim": None, "mlp": 32,
    "precision": "fp32",
}  # fmt: skip


def settings(
    task: str, variant: str, preset: str, *, small: bool = False, batch: int | None = None, block: int | None = None
) -> Config:
    """The preset's model for a task, with a variant's attention. batch, block: replace the preset's."""
    attention, mask = VARIANTS[variant]
    chosen = {name: value for name, value in (("batch", batch), ("block", block)) if value is not None}
    return configure(preset, {"task": task, "attention": attention, "mask": mask, **(SMALL if small else {}), **chosen})


def full_batch(config: Config, examples: int) -> Batch:
    return _batch(config, [config.shape.max_tokens] * examples * TASKS[config.task].towers)


def ragged_batch(config: Config) -> Batch:
    longest, towers = config.shape.max_tokens, TASKS[config.task].towers
    return _batch(config, [longest] * towers + [max(1, longest * 3 // 8)] * towers)


def without_dropout(config: Config) -> Config:
    return replace(config, dropout=0.0, attention_dropout=0.0)


def _batch(config: Config, lengths: list[int]) -> Batch:
    task, random = TASKS[config.task], np.random.default_rng(0)
    symbols = random.integers(1, min(task.vocabulary - 1, 256), sum(lengths), dtype=np.uint8)
    edges = np.concatenate([[0], np.cumsum(lengths)])
    labels = random.integers(0, task.classes, len(lengths) // task.towers, dtype=np.uint8)
    begins, ends = edges[:-1].reshape(-1, task.towers), edges[1:].reshape(-1, task.towers)
    return collate(Examples(symbols, begins, ends, labels, shift=0), np.arange(len(labels)), config.shape)
