"""The rows of a tensor of tokens that are exchanged: taken, put in place, and added to other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask.cache import once
from sparseflash.distributed.shards import Integers


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a tensor `[batch * heads * tokens, ...]`, as runs, for each rank that they are exchanged with.

    >>> rows = Rows(starts=np.array([4, 0]), sizes=np.array([2, 1]), counts=[2, 1])
    >>> rows.taken(torch.arange(10, 20)).tolist()
    [14, 15, 10]

    `starts`, `sizes`: int64 `[runs]`, first row and length of each run, for rank 0 first; `counts`: rows for each rank.
    """

    starts: Integers
    sizes: Integers
    counts: list[int]
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)  # one entry for each device in use

    @cached_property
    def _are_in_order(self) -> bool:
        return bool((self.starts == self.sizes.cumsum() - self.sizes).all())

    def are_all(self, count: int) -> bool:
        return sum(self.counts) == count and self._are_in_order

    def taken(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The rows of `x [rows, ...]`, written to `out` if it is given; x itself if they are all of it and no `out`."""
        if self.are_all(len(x)):
            return x if out is None else out.copy_(x)
        if out is None:
            return x.index_select(0, self.on(x.device))
        return torch.index_select(x, 0, self.on(x.device), out=out)

    def placed(self, values: Tensor, count: int) -> Tensor:
        """A tensor of `count` rows with these values in these rows and zeros elsewhere; the inverse of `taken`."""
        if self.are_all(count):
            return values
        return values.new_zeros((count, *values.shape[1:])).index_copy_(0, self.on(values.device), values)

    def on(self, device: torch.device) -> Tensor:
        """The numbers of the rows, int64 `[sum(counts)]`, made once for each device."""
        return once(self._made, device, lambda: self._numbers(device))

    def _numbers(self, device: torch.device) -> Tensor:
        sizes = torch.from_numpy(self.sizes).to(device)
        shift = torch.from_numpy(self.starts - (self.sizes.cumsum() - self.sizes)).to(device)
        total = sum(self.counts)
        return torch.repeat_interleave(shift, sizes, output_size=total) + torch.arange(total, device=device)


class Additions:
    """Sums of a tensor and of others that have some of its rows, in their order; each sum is rounded once.

    >>> added = Additions([Rows(np.array([1]), np.array([2]), [2]), Rows(np.array([2]), np.array([1]), [1])])
    >>> added(torch.zeros(3, 1), [torch.ones(2, 1), torch.ones(1, 1)], 3).flatten().tolist()
    [0.0, 1.0, 2.0]

    Rows for several ranks count as one tensor for each rank, in order. No row may come twice for one rank.
    """

    def __init__(self, rows: Sequence[Rows]) -> None:
        self.rows = list(rows)
        self._disjoint: dict[int, bool] = {}
        self._touched: dict[Any, Any] = {}

    def __call__(self, first: Tensor | None, others: Sequence[Tensor], count: int) -> Tensor:
        """`first [count, D]`, or zeros for None, plus the `others`, one for each `Rows`; may overwrite `first`."""
        begin = 0
        if first is None:
            if self.rows[0].are_all(count):
                first, begin = others[0], 1
            else:
                first = others[0].new_zeros(count, others[0].shape[1])
        some = [(rows, x) for rows, x in zip(self.rows[begin:], others[begin:], strict=True) if len(x)]
        if len(some) == 1 and some[0][0].are_all(count):
            return first.add_(some[0][1])
        if self._are_disjoint(begin):
            for rows, x in some:
                at = rows.on(first.device)
                first.index_copy_(0, at, first.index_select(0, at) + x)
            return first
        touched, places = self._places(begin, first.device)
        sums = first.index_select(0, touched).to(torch.promote_types(first.dtype, torch.float32))
        for at, x in zip(places, self._by_rank(begin, others), strict=True):
            sums.index_copy_(0, at, sums.index_select(0, at) + x)
        return first.index_copy_(0, touched, sums.to(first.dtype))

    def _are_disjoint(self, begin: int) -> bool:
        if begin not in self._disjoint:
            some = self.rows[begin:]
            starts, sizes = (np.concatenate([getattr(rows, name) for rows in some]) for name in ("starts", "sizes"))
            order = np.argsort(starts, kind="stable")
            starts, ends = starts[order], (starts + sizes)[order]
            self._disjoint[begin] = bool((ends[:-1] <= starts[1:]).all())
        return self._disjoint[begin]

    def _places(self, begin: int, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        def made() -> tuple[Tensor, list[Tensor]]:
            rows = self._by_rank(begin, [rows.on(device) for rows in self.rows])
            touched = torch.cat(rows).unique()
            return touched, [torch.searchsorted(touched, some) for some in rows]

        return once(self._touched, (begin, device), made)

    def _by_rank(self, begin: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        parts = [x.split(rows.counts) for rows, x in zip(self.rows[begin:], tensors[begin:], strict=True)]
        ranks = max(len(some) for some in parts)
        return [some[rank] for rank in range(ranks) for some in parts if rank < len(some) and len(some[rank])]
