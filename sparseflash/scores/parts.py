"""Score modifications as a text and tensors, as registered operators take them, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparseflash.scores.change import Change, Scores


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
        changes.append(Change.types[kind].of(own, [float(number) for number in numbers]))
    return Scores(tuple(changes))
