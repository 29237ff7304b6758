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

PADDING = 0


@dataclass(frozen=True)
class Shape:
    """How sequences become rows of a batch."""

    length: int  # N, a multiple of the mask's block
    max_tokens: int  # longer sequences are cut to this many tokens, as in the reference loader
    cls: int | None  # the id of [CLS], which is put first; None: it is not

    @staticmethod
    def fit(max_tokens: int, *, cls: int | None, block: int) -> Shape:
        """The shortest length for `max_tokens` tokens, in whole blocks.

        >>> Shape.fit(2000, cls=16, block=128).length
        2048
        """
        return Shape(-(-(max_tokens + (cls is not None)) // block) * block, max_tokens, cls)


@dataclass(frozen=True)
class Batch:
    """B examples of T sequences each; the sequences of an example follow each other."""

    ids: torch.Tensor  # int64 [B * T, N], padding at the end
    lengths: torch.Tensor  # int32 [B * T], tokens before the padding, [CLS] counted
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
    first = int(shape.cls is not None)
    ids = np.full((len(rows) * examples.towers, shape.length), PADDING, np.int64)
    lengths = np.empty(len(ids), np.int32)
    for place in range(len(ids)):
        symbols = examples.sequence(rows[place // examples.towers], place % examples.towers)[: shape.max_tokens]
        ids[place, first : first + len(symbols)] = symbols
        ids[place, first : first + len(symbols)] += examples.shift
        lengths[place] = first + len(symbols)
    if shape.cls is not None:
        ids[:, 0] = shape.cls
    labels = examples.labels[rows].astype(np.int64)
    return Batch(
        torch.from_numpy(ids),
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
