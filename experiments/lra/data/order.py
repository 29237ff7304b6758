"""The order of the training examples: a pure function of the seed and the step.

So a resumed run needs no state of a loader: step s always sees the same examples.

The epochs, each all examples once in an order of its own, follow each other without a gap, and batches are cut from
that one long row. Where an epoch is no whole number of batches, one batch lies in two epochs.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


class Order:
    """Which examples a step trains on.

    sizes: int64 [count], how long each example's row is, in any unit: then the examples of a batch are of one size, as
        far as there are enough, and which of them come together, and when, is as random as that allows. None: it does
        not matter who comes together.
    share: which of a batch's examples are this process's, where several train together.
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
        self._epoch = lru_cache(maxsize=2)(self._new_epoch)  # a batch lies in two at most

    def rows(self, step: int) -> NDArray[np.int64]:
        """The indices of the examples of step `step` (from 0), int64 [batch], or the share of them."""
        epoch, begin = divmod(step * self.batch, self.count)
        rows = self._epoch(epoch)[begin : begin + self.batch]
        if len(rows) < self.batch:
            rows = np.concatenate([rows, self._epoch(epoch + 1)[: self.batch - len(rows)]])
        return rows[self.share]

    def _new_epoch(self, epoch: int) -> NDArray[np.int64]:
        """All examples once."""
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(self.count)
        if self.sizes is None:
            return order
        # The examples before `first` complete the last epoch's last batch, and those from `last` on begin the next
        # epoch's first: they are whoever the permutation put there, so no length is favoured.
        first = -epoch * self.count % self.batch
        last = first + (self.count - first) // self.batch * self.batch
        whole = order[first:last]
        # The sort is stable: among equals, the permutation decides who comes together.
        batches = whole[np.argsort(self.sizes[whole], kind="stable")].reshape(-1, self.batch)
        return np.concatenate([order[:first], *random.permutation(batches), order[last:]])
