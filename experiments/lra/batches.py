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

    block: int  # of the mask: rows have whole blocks
    max_tokens: int  # longer sequences are cut to this many tokens, as in the reference loader
    cls: int | None  # the id of [CLS], which is put first; None: it is not
    drop_background: bool = False  # leave out symbols 0, the black pixels of an image

    @property
    def first(self) -> int:
        """Where a sequence begins in its row."""
        return int(self.cls is not None)

    @property
    def length(self) -> int:
        """The length of the longest row.

        >>> Shape(128, 2000, cls=16).length
        2048
        """
        return self.whole_blocks(self.max_tokens + self.first)

    def places(self, longest: int) -> int:
        """How many places there are for tokens, of sequences of at most `longest` symbols."""
        return self.first + longest if self.drop_background else self.length

    def whole_blocks(self, tokens: int) -> int:
        """This many tokens, rounded up."""
        return -(-tokens // self.block) * self.block


@dataclass(frozen=True)
class Batch:
    """B examples of T sequences each; the sequences of an example follow each other."""

    ids: torch.Tensor  # int64 [B * T, N], padding at the end; N is the longest row's, in whole blocks
    lengths: torch.Tensor  # int32 [B * T], tokens before the padding, [CLS] counted
    places: torch.Tensor | None  # int64 [B * T, N], where each token stood before some were left out; None: none was
    labels: torch.Tensor  # int64 [B]
    live_tokens: int  # sum of lengths, known without asking the device

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; from pinned memory where that lets the copy overlap with work on a GPU."""
        if device.type == "cpu":
            return self
        ids, lengths, places, labels = (
            None if tensor is None else tensor.pin_memory().to(device, non_blocking=True)
            for tensor in (self.ids, self.lengths, self.places, self.labels)
        )
        return Batch(ids, lengths, places, labels, self.live_tokens)


def collate(examples: Examples, rows: NDArray[np.int64], shape: Shape) -> Batch:
    """The examples with these indices as one batch."""
    sequences = [examples.sequence(row, tower) for row in rows for tower in range(examples.towers)]
    kept = [live_pixels(each, shape) for each in sequences] if shape.drop_background else None
    if kept is not None:
        sequences = [each[pixels] for each, pixels in zip(sequences, kept, strict=True)]
    sequences = [each[: shape.max_tokens] for each in sequences]
    first = shape.first
    lengths = np.array([first + len(each) for each in sequences], np.int32)
    ids = np.full((len(sequences), shape.whole_blocks(int(lengths.max()))), PADDING, np.int64)
    places = None if kept is None else np.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, first : lengths[row]] = sequence
        ids[row, first : lengths[row]] += examples.shift
        if places is not None and kept is not None:
            places[row, first : lengths[row]] = first + kept[row]
    if shape.cls is not None:
        ids[:, 0] = shape.cls
    labels = examples.labels[rows].astype(np.int64)
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(lengths),
        None if places is None else torch.from_numpy(places),
        torch.from_numpy(labels),
        int(lengths.sum()),
    )


def live_pixels(symbols: NDArray[np.uint8], shape: Shape) -> NDArray[np.int64]:
    """Where an image is not black; of one that is black all over, its first pixel."""
    live = np.flatnonzero(symbols)
    check_room(len(live), shape)
    return live if len(live) else np.zeros(1, np.int64)


def check_images(examples: Examples, shape: Shape) -> None:
    """Raises ValueError if an image has more pixels than a row has tokens: before a run, not at its end."""
    if shape.drop_background and shape.max_tokens < (examples.ends - examples.begins).max():
        rows = np.argsort(examples.begins[:, 0])  # as they lie on the disk
        check_room(max(int(np.count_nonzero(examples.sequence(row) != 0)) for row in rows), shape)


def check_room(live: int, shape: Shape) -> None:
    if live > shape.max_tokens:
        raise ValueError(
            f"an image has {live} pixels that are not black, and would lose some: raise --max-tokens, which is "
            f"{shape.max_tokens}"
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
