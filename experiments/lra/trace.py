"""A second loss in training: which curve each drawn pixel of a Pathfinder image lies on, which its generator knows.

The answer alone is one bit for an image of hundreds of pixels, and the loss can stay at that of guessing for long. What
has to be traced to find it is told here at every pixel: how many markers the curve through it has. Only files that
`python -m experiments.pathfinder generate` has written say so, and results are told as ones with pixel labels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from experiments.lra.batches import NO_LABEL
from experiments.lra.cache import Examples
from experiments.lra.model import Classifier
from experiments.lra.tasks.task import Data


class Tracer(Classifier):
    """A classifier with a second head, which tells every token's class while the model trains.

    traces: how many classes there are; sizes: those of the classifier.
    """

    def __init__(self, *arguments: Any, traces: int, width: int, **sizes: Any) -> None:
        super().__init__(*arguments, width=width, **sizes)
        self.tracer = nn.Linear(width, traces)

    def forward(  # type: ignore[override]
        self, ids: Tensor, lengths: Tensor, places: Tensor | None = None, padded: bool = True
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The classifier's logits [B, C], and in training those of the tokens' classes [B, N, traces], too."""
        x = self.encode(ids, lengths, places, padded)
        logits = self.answers(x, lengths)
        return (logits, self.tracer(x)) if self.training else logits


def tracing_loss(logits: Tensor, traced: Tensor) -> Tensor:
    """The mean cross-entropy, in nats, of the tokens that have a class.

    logits: [B, N, traces]; traced: int64 [B, N], `NO_LABEL` where there is none.

    >>> import torch
    >>> tracing_loss(torch.zeros(1, 2, 3), torch.tensor([[1, NO_LABEL]])).item()
    1.098612...
    """
    return F.cross_entropy(logits.flatten(0, 1), traced.flatten(), ignore_index=NO_LABEL)


def classes_of(data: Data) -> Examples:
    """The classes of the training images' pixels; raises ValueError where nothing tells them."""
    if data.traces is None:
        raise ValueError(
            f"auxiliary needs data that say which curve each pixel lies on, as a file that `python -m "
            f"experiments.pathfinder generate` has written does; {data.folder} does not: leave it at 0"
        )
    return data.traces()
