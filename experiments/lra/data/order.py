"""The order of the training examples: a function of seed and step.

A batch may lie in two epochs.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


class Order:
    """sizes: int64 [count], the row length of each example: a batch has examples of one size as far as possible; None:
    random. share: this process's examples."""

    def __init__(
        self,
        count: int,
        batch: int,
        seed: int,
        sizes: NDArray[np.int64] | None = None,
        share: slice = slice(None),
    ) -> None:
        if batch > count:
            raise ValueError(f"the batch must be at most the number of training examples, {count}; got {batch}")
        self.count, self.batch, self.seed, self.share = count, batch, seed, share
        self.sizes = sizes if sizes is not None and sizes.min() < sizes.max() else None
        self._epoch = lru_cache(maxsize=2)(self._new_epoch)

    def rows(self, step: int) -> NDArray[np.int64]:
        epoch, begin = divmod(step * self.batch, self.count)
        rows = self._epoch(epoch)[begin : begin + self.batch]
        if len(rows) < self.batch:
            rows = np.concatenate([rows, self._epoch(epoch + 1)[: self.batch - len(rows)]])
        return rows[self.share]

    def _new_epoch(self, epoch: int) -> NDArray[np.int64]:
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(self.count)
        if self.sizes is None:
            return order
        # Examples before `first` complete the previous epoch's last batch; examples from `last` on begin the next one's
        # first.
        first = -epoch * self.count % self.batch
        last = first + (self.count - first) // self.batch * self.batch
        whole = order[first:last]
        batches = whole[np.argsort(self.sizes[whole], kind="stable")].reshape(-1, self.batch)
        return np.concatenate([order[:first], *random.permutation(batches), order[last:]])
