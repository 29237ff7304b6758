"""Baselines without reasoning: only results above them are meaningful."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.lra.data.examples import Examples
from experiments.lra.no_attention.results import stored as no_attention
from experiments.lra.tasks.task import Data


@dataclass(frozen=True)
class Baseline:
    rule: str
    accuracy: float
    loss: float | None  # in nats, of class frequencies


def baselines(data: Data) -> list[Baseline]:
    """The majority class; in ListOps the best answer given the root operator (the first token); in generated Pathfinder
    the best answer given the dots and the dashes below them; and the models without attention that have stored
    accuracies on these splits.
    """
    found = [majority(data)]
    if data.task.name == "listops":
        found.append(fit("root operator", groups_of(data.train, True), groups_of(data.test, True), data))
    return found + [Baseline(rule, accuracy, None) for rule, accuracy in [*data.shortcuts(), *no_attention(data)]]


def majority(data: Data) -> Baseline:
    return fit("majority class", groups_of(data.train, False), groups_of(data.test, False), data)


def groups_of(examples: Examples, by_first_token: bool) -> NDArray[np.uint8]:
    return examples.first_symbols if by_first_token else np.zeros(len(examples), np.uint8)


def fit(rule: str, train_groups: NDArray[np.uint8], test_groups: NDArray[np.uint8], data: Data) -> Baseline:
    counts = np.ones((data.task.vocabulary, data.task.classes))  # no class has probability 0
    np.add.at(counts, (train_groups, data.train.labels), 1)
    chances = counts / counts.sum(1, keepdims=True)
    accuracy = float((counts.argmax(1)[test_groups] == data.test.labels).mean())
    loss = float(-np.log(chances[test_groups, data.test.labels]).mean())
    return Baseline(rule, accuracy, loss)
