"""The order of the training examples: a pure function of seed and step, so a resumed run needs no loader state.

Each epoch has all examples once. Batches are cut from the concatenated epochs, so a batch may lie in two.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


class Order:
    """The examples of each training step.

    sizes: int64 [count], the row length of each example, in any unit. A batch then has examples of equal size as far as
        possible. None: random batches.
    share: this process's examples of a batch, if several processes train together.
    """

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
        self._epoch = lru_cache(maxsize=2)(self._new_epoch)  # a batch lies in at most two epochs

    def rows(self, step: int) -> NDArray[np.int64]:
        """The indices of the examples of step `step` (from 0), int64 [batch], or this process's share."""
        epoch, begin = divmod(step * self.batch, self.count)
        rows = self._epoch(epoch)[begin : begin + self.batch]
        if len(rows) < self.batch:
            rows = np.concatenate([rows, self._epoch(epoch + 1)[: self.batch - len(rows)]])
        return rows[self.share]

    def _new_epoch(self, epoch: int) -> NDArray[np.int64]:
        """All examples once, in the order of the epoch."""
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(self.count)
        if self.sizes is None:
            return order
        # The examples before `first` complete the previous epoch's last batch; the examples from `last` on begin the
        # next epoch's first batch. The permutation selects them, so no length is favoured.
        first = -epoch * self.count % self.batch
        last = first + (self.count - first) // self.batch * self.batch
        whole = order[first:last]
        # The sort is stable, so the permutation decides which examples of equal size share a batch.
        batches = whole[np.argsort(self.sizes[whole], kind="stable")].reshape(-1, self.batch)
        return np.concatenate([order[:first], *random.permutation(batches), order[last:]])
