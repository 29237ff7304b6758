"""Batches of one fixed shape, in an order that is a pure function of the seed and the step.

So a resumed run needs no state of a loader: step s always sees the same examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.lra.cache import Examples
from experiments.lra.tokens import CLS, PADDING


@dataclass(frozen=True)
class Shape:
    """How examples become rows of a batch."""

    length: int  # N, a multiple of the mask's block
    max_tokens: int  # longer examples are cut to this many tokens, as in the reference loader
    cls: bool  # put [CLS] first

    @staticmethod
    def fit(max_tokens: int, *, cls: bool, block: int) -> Shape:
        """The shortest length for `max_tokens` tokens, in whole blocks.

        >>> Shape.fit(2000, cls=True, block=128).length
        2048
        """
        return Shape(-(-(max_tokens + cls) // block) * block, max_tokens, cls)


@dataclass(frozen=True)
class Batch:
    ids: torch.Tensor  # int64 [B, N], padding at the end
    lengths: torch.Tensor  # int32 [B], tokens before the padding, [CLS] counted
    labels: torch.Tensor  # int64 [B]
    live_tokens: int  # sum of lengths, known without asking the device

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; from pinned memory where that lets the copy overlap with work on a GPU."""
        if device.type == "cpu":
            return self
        ids, lengths, labels = (
            tensor.pin_memory().to(device, non_blocking=True) for tensor in (self.ids, self.lengths, self.labels)
        )
        return Batch(ids, lengths, labels, self.live_tokens)


def collate(examples: Examples, rows: NDArray[np.int64], shape: Shape) -> Batch:
    """The examples with these indices as one batch."""
    ids = np.full((len(rows), shape.length), PADDING, np.uint8)
    lengths = np.empty(len(rows), np.int32)
    for place, row in enumerate(rows):
        example = examples[row][: shape.max_tokens]
        ids[place, shape.cls : shape.cls + len(example)] = example
        lengths[place] = shape.cls + len(example)
    if shape.cls:
        ids[:, 0] = CLS
    labels = examples.labels[rows].astype(np.int64)
    return Batch(
        torch.from_numpy(ids.astype(np.int64)),
        torch.from_numpy(lengths),
        torch.from_numpy(labels),
        int(lengths.sum()),
    )


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of `count` examples for one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def rows_of_step(count: int, batch: int, seed: int, step: int) -> NDArray[np.int64]:
    """Which examples step `step` (from 0) trains on; an epoch's last, incomplete batch is left out."""
    if batch > count:
        raise ValueError(f"the batch must be at most the number of training examples, {count}; got {batch}")
    epoch, place = divmod(step, count // batch)
    return epoch_order(count, seed, epoch)[place * batch : (place + 1) * batch]


def training_batches(examples: Examples, shape: Shape, batch: int, seed: int, first_step: int) -> Iterator[Batch]:
    """Batches for the steps from `first_step` on, without end."""
    step = first_step
    while True:
        yield collate(examples, rows_of_step(len(examples), batch, seed, step), shape)
        step += 1


def evaluation_batches(examples: Examples, shape: Shape, batch: int, limit: int) -> Iterator[Batch]:
    """The first `limit` examples once, in the order of the file; the last batch may be smaller."""
    for start in range(0, min(limit, len(examples)), batch):
        yield collate(examples, np.arange(start, min(start + batch, limit, len(examples))), shape)
