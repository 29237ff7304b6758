"""Self-pretraining: an encoder learns to predict hidden tokens of the task's inputs, without answers.

Ido Amos, Jonathan Berant and Ankit Gupta, "Never Train from Scratch: Fair Comparison of Long-Sequence Models Requires
Data-Driven Priors" (ICLR 2024).

A hidden token has the padding id, which no live token has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.lra.baselines import Baseline
from experiments.lra.data.batches import PADDING, Batch, Shape, collate
from experiments.lra.data.examples import Examples
from experiments.lra.model.encoder import Encoder
from experiments.lra.tasks.task import Data
from sparseflash import BlockMask

_TRAINING, _SCORING = 0, 1
_EXAMPLES_COUNTED = 2000


class Denoiser(Encoder):
    def __init__(self, masks: Sequence[BlockMask], *, vocabulary: int, width: int, **sizes: Any) -> None:
        super().__init__(masks, vocabulary=vocabulary, width=width, **sizes)
        self.namer = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, lengths: Tensor, places: Tensor | None, padded: bool, asked: Tensor) -> Tensor:
        logits: Tensor = self.namer(self.encode(ids, lengths, places, padded).flatten(0, 1)[asked])
        return logits


def hide(batch: Batch, share: float, random: np.random.Generator, first: int = 0) -> Batch:
    """At least one live token is hidden; ids are labels. first: the index of an example's first token."""
    at = torch.arange(batch.ids.shape[1])
    own = ((at >= first) & (at < batch.lengths[:, None])).flatten().nonzero().squeeze(1).numpy()
    count = max(1, round(share * len(own)))
    asked = torch.from_numpy(np.sort(random.choice(own, count, replace=False)))
    ids = batch.ids.flatten().clone()
    labels = ids[asked]
    ids[asked] = PADDING
    return replace(batch, ids=ids.view_as(batch.ids), labels=labels, asked=asked)


def hidden_for_training(
    batches: Iterable[Batch], shape: Shape, share: float, seed: int, step: int, rank: int
) -> Iterator[Batch]:
    for number, batch in enumerate(batches, start=step):
        yield hide(batch, share, np.random.default_rng([_TRAINING, seed, number, rank]), shape.first)


def hidden_for_scoring(batches: Iterable[Batch], shape: Shape, share: float, numbers: Iterable[int]) -> Iterator[Batch]:
    for number, batch in zip(numbers, batches):
        yield hide(batch, share, np.random.default_rng([_SCORING, number]), shape.first)


def frequency_baseline(data: Data, shape: Shape) -> Baseline:
    train, test = (_counts(split, shape, data.task.vocabulary) for split in (data.train, data.test))
    chances = (train + 1) / (train + 1).sum()
    test_chances = test / test.sum()
    accuracy = float(test_chances[train.argmax()])
    return Baseline("most frequent token", accuracy, float(-(test_chances * np.log(chances)).sum()))


def _counts(examples: Examples, shape: Shape, vocabulary: int) -> NDArray[np.int64]:
    some = collate(examples, np.arange(min(len(examples), _EXAMPLES_COUNTED)), replace(shape, cls=None))
    counts = np.bincount(some.ids.flatten().numpy(), minlength=vocabulary)
    counts[PADDING] = 0
    return counts
