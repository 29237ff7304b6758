from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.lra.no_attention.bags import features
from experiments.lra.tasks.task import Data

STRENGTHS = (1.0, 10.0, 100.0)  # inverse regularisation; a part of the training examples selects one
_SELECTS = 0.1  # of the training examples


@dataclass(frozen=True)
class Answered:
    accuracy: float
    validation: float  # of the training examples that selected the strength, or of the validation split
    examples: int  # trained on
    parameters: int


def fitted(data: Data, run: int, most: int | None = None) -> Answered:
    """Logistic regression on the bags of runs of 1 to `run` tokens.

    A tenth of the training examples selects the regularisation, because validation and test are one split in some
    tasks; then all are fitted.
    """
    from sklearn.linear_model import LogisticRegression

    train = data.train.take(np.arange(min(most or len(data.train), len(data.train))))
    inputs, labels = features(train, data.task.longest, run), train.labels
    selects = np.random.default_rng(0).random(len(train)) < _SELECTS  # drawn: classes may alternate
    found = {}
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=300).fit(inputs[~selects], labels[~selects])
        found[strength] = model.score(inputs[selects], labels[selects])
    best = max(found, key=found.__getitem__)
    model = LogisticRegression(C=best, max_iter=300).fit(inputs, labels)
    accuracy = model.score(features(data.test, data.task.longest, run), data.test.labels)
    return Answered(float(accuracy), float(found[best]), len(train), model.coef_.size + model.intercept_.size)
