"""Self-pretraining: an encoder learns to predict hidden tokens of the task's inputs, without answers.

Ido Amos, Jonathan Berant and Ankit Gupta, "Never Train from Scratch: Fair Comparison of Long-Sequence Models Requires
Data-Driven Priors" (ICLR 2024).

A hidden token has the padding id, which no live token has, so the vocabulary stays the same.
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

_TRAINING, _SCORING = 0, 1  # independent random numbers
_EXAMPLES_COUNTED = 2000


class Denoiser(Encoder):
    """Predicts hidden tokens. sizes: the encoder's; see encoder.py."""

    def __init__(self, masks: Sequence[BlockMask], *, vocabulary: int, width: int, **sizes: Any) -> None:
        super().__init__(masks, vocabulary=vocabulary, width=width, **sizes)
        self.namer = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, lengths: Tensor, places: Tensor | None, padded: bool, asked: Tensor) -> Tensor:
        """Logits [M, vocabulary] of the tokens at `asked` [M], positions in the flattened ids; see `Encoder.encode`."""
        logits: Tensor = self.namer(self.encode(ids, lengths, places, padded).flatten(0, 1)[asked])
        return logits


def hide(batch: Batch, share: float, random: np.random.Generator, first: int = 0) -> Batch:
    """The batch with this share of its live tokens hidden, at least one, and with their ids as labels.

    first: the index of an example's first token; earlier tokens are never hidden.
    """
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
    """The batches of the steps from `step` on, each with other hidden tokens."""
    for number, batch in enumerate(batches, start=step):
        yield hide(batch, share, np.random.default_rng([_TRAINING, seed, number, rank]), shape.first)


def hidden_for_scoring(batches: Iterable[Batch], shape: Shape, share: float, numbers: Iterable[int]) -> Iterator[Batch]:
    """The batches with these numbers; a batch always has the same hidden tokens."""
    for number, batch in zip(numbers, batches):  # the numbers are endless
        yield hide(batch, share, np.random.default_rng([_SCORING, number]), shape.first)


def frequency_baseline(data: Data, shape: Shape) -> Baseline:
    """The accuracy and loss of predicting test tokens by their training frequencies."""
    train, test = (_counts(split, shape, data.task.vocabulary) for split in (data.train, data.test))
    chances = (train + 1) / (train + 1).sum()  # no token has probability 0
    test_chances = test / test.sum()
    accuracy = float(test_chances[train.argmax()])
    return Baseline("most frequent token", accuracy, float(-(test_chances * np.log(chances)).sum()))


def _counts(examples: Examples, shape: Shape, vocabulary: int) -> NDArray[np.int64]:
    """The counts of each id in the first examples."""
    some = collate(examples, np.arange(min(len(examples), _EXAMPLES_COUNTED)), replace(shape, cls=None))
    counts = np.bincount(some.ids.flatten().numpy(), minlength=vocabulary)
    counts[PADDING] = 0
    return counts
