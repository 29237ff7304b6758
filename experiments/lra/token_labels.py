"""A second training loss, with labels of tokens.

Of a generated Pathfinder image: the number of markers on the curve of each drawn pixel, which a model must find by
tracing. Only files of `python -m experiments.pathfinder generate` have these labels. Of a ListOps expression: the value
of each operator's expression.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from experiments.lra.data.examples import Examples
from experiments.lra.model.classifier import Classifier
from experiments.lra.tasks.task import Data
from experiments.training.steps import NO_LABEL


def labels_of(task: str) -> str:
    """What a task's labels of tokens are.

    >>> labels_of("listops"), labels_of("pathfinder32")
    ('values of expressions', 'pixel labels')
    """
    return "values of expressions" if task == "listops" else "pixel labels"


class TokenLabelClassifier(Classifier):
    """A classifier with a second head, which predicts every token's class during training."""

    def __init__(self, *arguments: Any, token_classes: int, width: int, **sizes: Any) -> None:
        super().__init__(*arguments, width=width, **sizes)
        self.tracer = nn.Linear(width, token_classes)

    def forward(  # type: ignore[override]
        self, ids: Tensor, lengths: Tensor, places: Tensor | None = None, padded: bool = True
    ) -> Tensor | tuple[Tensor, Tensor]:
        x = self.encode(ids, lengths, places, padded)
        logits = self.head(x, lengths)
        return (logits, self.tracer(x)) if self.training else logits


def token_label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """In nats, of the tokens with a class.

    >>> import torch
    >>> round(token_label_loss(torch.zeros(1, 2, 3), torch.tensor([[1, NO_LABEL]])).item(), 4)
    1.0986
    """
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)


def token_labels_of(data: Data) -> Examples:
    if data.token_labels is None:
        raise ValueError(
            f"auxiliary needs data that say which curve each pixel lies on, as a file that `python -m "
            f"experiments.pathfinder generate` has written does; {data.folder} does not: leave it at 0"
        )
    return data.token_labels()
