"""Batches: sequences of similar length as the rows of a tensor, padded to the longest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.lra.data.augment import Image, Turning
from experiments.lra.data.examples import Examples
from experiments.lra.data.order import Order
from experiments.training.steps import NO_LABEL, BatchSize

PADDING = 0
NO_CLASS = 255  # of a token among token labels
_TENSORS = ("ids", "lengths", "places", "labels", "asked", "token_labels")


@dataclass(frozen=True)
class Shape:
    block: int  # of the mask
    max_tokens: int  # longer sequences are cut, as in the reference loader
    cls: int | None  # the id of [CLS], which is put first; None: no [CLS]
    drop_background: bool = False  # drop zeros, the black pixels of an image
    multiple: int | None = None  # rows have a multiple of this many tokens; None: whole blocks of the mask
    shortest_row: int = 0  # tokens; shorter rows are padded

    @property
    def first(self) -> int:
        return int(self.cls is not None)

    @property
    def length(self) -> int:
        """The length of the longest row, and of the mask, in whole blocks.

        >>> Shape(128, 2000, cls=16).length
        2048
        """
        return -(-(self.max_tokens + self.first) // self.block) * self.block

    def places(self, longest: int) -> int:
        return self.first + longest if self.drop_background else self.length

    def row(self, tokens: int) -> int:
        """The row length of a batch whose longest sequence has this many tokens, including [CLS]."""
        multiple = self.multiple or self.block
        return max(-(-tokens // multiple) * multiple, self.shortest_row)


@dataclass(frozen=True)
class Batch:
    """B examples of T sequences each; the sequences of an example are consecutive."""

    ids: torch.Tensor  # int64 [B * T, N], padding at the end; N is the longest length, rounded up
    lengths: torch.Tensor  # int32 [B * T], tokens before the padding, including [CLS]
    places: torch.Tensor | None  # int64 [B * T, N], the original index of each token; None if no token was dropped
    labels: torch.Tensor  # int64 [B], or [M] for hidden tokens
    live_tokens: int  # sum of lengths, known on the host
    asked: torch.Tensor | None = None  # int64 [M], positions of hidden tokens in the flattened ids
    token_labels: torch.Tensor | None = None  # int64 [B * T, N], classes of tokens; NO_LABEL for none

    @property
    def size(self) -> BatchSize:
        return BatchSize(len(self.labels), self.live_tokens, self.ids.numel())

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: getattr(self, name) for name in _TENSORS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def to(self, device: torch.device) -> Batch:
        pins = device.type == "cuda" and self.ids.device.type == "cpu"
        return self._with_each(lambda tensor: (tensor.pin_memory() if pins else tensor).to(device, non_blocking=pins))

    def copy_on(self, device: torch.device) -> Batch:
        return self._with_each(lambda tensor: tensor.to(device, copy=True))

    def _with_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors().items()})


def collate(
    examples: Examples,
    rows: NDArray[np.int64],
    shape: Shape,
    change: Callable[[list[Image]], list[Image]] | None = None,
    token_labels: Examples | None = None,
) -> Batch:
    def sequences_of(source: Examples) -> list[NDArray[np.uint8]]:
        found = [source.sequence(row, tower) for row in rows for tower in range(source.towers)]
        return found if change is None else change(found)

    sequences = sequences_of(examples)
    classes = None if token_labels is None else sequences_of(token_labels)
    kept = [live_pixels(each, shape) for each in sequences] if shape.drop_background else None
    if kept is not None:
        sequences = [each[pixels] for each, pixels in zip(sequences, kept, strict=True)]
    sequences = [each[: shape.max_tokens] for each in sequences]
    first = shape.first
    lengths = np.array([first + len(each) for each in sequences], np.int32)
    ids = np.full((len(sequences), shape.row(int(lengths.max()))), PADDING, np.int64)
    places = None if kept is None else np.zeros_like(ids)
    labelled = None if classes is None else np.full_like(ids, NO_LABEL)
    for row, sequence in enumerate(sequences):
        own = slice(first, lengths[row])  # neither [CLS] nor padding
        ids[row, own] = sequence
        ids[row, own] += examples.shift
        if places is not None and kept is not None:
            places[row, own] = kept[row]
            places[row, own] += first
        if labelled is not None and classes is not None:
            shown = classes[row][: len(sequence)] if kept is None else classes[row][kept[row]]
            labelled[row, own] = np.where((sequence > 0) & (shown < NO_CLASS), shown.astype(np.int64), NO_LABEL)
    if shape.cls is not None:
        ids[:, 0] = shape.cls
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(lengths),
        None if places is None else torch.from_numpy(places),
        torch.from_numpy(examples.labels[rows].astype(np.int64)),
        int(lengths.sum()),
        token_labels=None if labelled is None else torch.from_numpy(labelled),
    )


def live_pixels(symbols: NDArray[np.uint8], shape: Shape) -> NDArray[np.int64]:
    live = np.flatnonzero(symbols)
    check_pixels(len(live), shape)
    return live if len(live) else np.zeros(1, np.int64)


def check_images(examples: Examples, shape: Shape) -> None:
    if shape.drop_background and shape.max_tokens < (examples.ends - examples.begins).max():
        check_pixels(int(live_counts(examples).max()), shape)


def live_counts(examples: Examples) -> NDArray[np.int64]:
    counts = np.zeros(len(examples), np.int64)
    for row in np.argsort(examples.begins[:, 0]):
        counts[row] = np.count_nonzero(examples.sequence(row))
    return counts


def blocks_of_rows(examples: Examples, shape: Shape) -> NDArray[np.int64]:
    symbols = live_counts(examples).clip(min=1) if shape.drop_background else (examples.ends - examples.begins).max(1)
    return -(-(np.minimum(symbols, shape.max_tokens) + shape.first) // shape.block)


def check_pixels(live: int, shape: Shape) -> None:
    if live > shape.max_tokens:
        raise ValueError(
            f"an image has {live} pixels that are not black, and would lose some: raise --max-tokens, which is "
            f"{shape.max_tokens}"
        )


def training_batches(
    examples: Examples,
    shape: Shape,
    order: Order,
    first_step: int,
    turning: Turning | None = None,
    token_labels: Examples | None = None,
) -> Iterator[Batch]:
    for step in count(first_step):
        change = None if turning is None else partial(turning, step)
        yield collate(examples, order.rows(step), shape, change, token_labels)


def evaluation_order(examples: Examples, shape: Shape, limit: int) -> NDArray[np.int64]:
    """The first `limit` examples, the shortest first, so that a batch has little padding."""
    rows = np.arange(min(limit, len(examples)))
    return rows[np.argsort(blocks_of_rows(examples.take(rows), shape), kind="stable")]


def evaluation_batches(
    examples: Examples,
    shape: Shape,
    batch: int,
    limit: int,
    share: slice = slice(None),
) -> Iterator[Batch]:
    """The first `limit` examples once, in the order of `evaluation_order`; the last batch may be smaller.

    share: this process's batches, if several processes evaluate together.
    """
    order = evaluation_order(examples, shape, limit)
    for start in range(0, len(order), batch)[share]:
        yield collate(examples, order[start : start + batch], shape)
