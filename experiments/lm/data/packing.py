"""Sequences of a fixed length from concatenated documents, in an order that a seed determines.

Sequence i holds the tokens from i * context on, and one more as the last label.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from experiments.lm.data.store import Part


@dataclass(frozen=True)
class Packing:
    part: Part
    context: int
    batch: int
    seed: int
    share: slice = field(default_factory=lambda: slice(None))

    def __post_init__(self) -> None:
        if self.count < self.batch:
            raise ValueError(
                f"the text must have at least one batch of sequences, {self.batch} of {self.context} tokens; got "
                f"{self.count}: lower --batch-tokens or --context, or give more text"
            )

    @property
    def count(self) -> int:
        return max(0, (len(self.part) - 1) // self.context)

    def numbers(self, step: int) -> np.ndarray:
        batches = self.count // self.batch
        epoch, place = divmod(step, batches)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.count)
        return order[place * self.batch : (place + 1) * self.batch][self.share]

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        places = numbers[:, None] * self.context + np.arange(self.context + 1)
        return self.part.tokens[places].astype(np.int32)

    def documents(self, number: int) -> list[int]:
        begin = number * self.context
        starts = self.part.starts
        first, last = np.searchsorted(starts, [begin, begin + self.context])
        inside = starts[first:last]
        bounds = np.unique(np.concatenate([[begin], inside, [begin + self.context]]))
        return [int(length) for length in np.diff(bounds)]
