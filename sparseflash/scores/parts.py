"""Score modifications as a text and tensors, as registered operators take them, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparseflash.scores.bias import Bias
from sparseflash.scores.change import Change, Scores
from sparseflash.scores.distance import Distance
from sparseflash.scores.key_bias import KeyBias
from sparseflash.scores.relative import Codes
from sparseflash.scores.sink import Sink
from sparseflash.scores.softcap import Softcap
from sparseflash.scores.temperature import Temperature
from sparseflash.scores.tile_bias import StoredTiles

# The possible parts of `Scores.prepared`, except for functions, which are no data.
_TYPES: dict[str, type[Change]] = {
    each.kind: each for each in (Temperature, Softcap, Distance, Codes, KeyBias, Bias, StoredTiles, Sink)
}


def put_together(described: str, tensors: Sequence[Tensor]) -> Scores:
    """The inverse of `Scores.described` and `Scores.tensors`.

    >>> import torch
    >>> from sparseflash import scores
    >>> changes = scores.alibi(torch.ones(2)) + scores.softcap(50.0)
    >>> put_together(changes.described(), changes.tensors()).kinds
    ('softcap', 'distance')
    """
    changes, rest = [], iter(tensors)
    for text in described.split(";"):
        kind, count, *numbers = text.split(" ")
        own = [next(rest) for _ in range(int(count))]
        changes.append(_TYPES[kind].of(own, [float(number) for number in numbers]))
    return Scores(tuple(changes))
