"""Learned tables of relative positions: one number a head and bucket of positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sparseflash.blockmask.arguments import checked_integers, have_contents, integer
from sparseflash.blockmask.cache import BoundedDict
from sparseflash.limits import MOST_TOKENS
from sparseflash.scores.change import Change, Learned, Place, Sizes, add_at, floating, per_head
from sparseflash.scores.positions import Packed

_LONG_RUN = 16  # codes: with such runs the kernels go through eight of them in a tile of 64 x 64

Bucket = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Codes(Change):
    """Adds `table[h, buckets[q_codes[i] - k_codes[j]]]`: every table of relative positions, as backends take it."""

    kind = "relative"
    order = 3
    table: Tensor  # [Hq, R]
    buckets: Tensor  # int32 [C]
    q_codes: Tensor  # int32 [Nq]
    k_codes: Tensor  # int32 [Nk]; differences lie in 0 .. C - 1
    # int32 [C + 1]: the last code of each code's run of equal buckets, then the first code of the last run. Empty
    # unless codes are distances and runs are mostly long.
    until: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.table, self.buckets, self.q_codes, self.k_codes, self.until

    def changed(self, scores: Tensor, at: Place) -> Tensor:
        return scores + self.table[at.head, self._bucket(at)].to(scores.dtype)

    def gradient(self, gradient: Tensor, scores: Tensor, changed: Tensor, at: Place, learned: Learned) -> Tensor:
        add_at(learned[0], [at.head, self._bucket(at)], gradient)
        return gradient

    def _bucket(self, at: Place) -> Tensor:
        return self.buckets[(self.q_codes[at.query] - self.k_codes[at.key]).long()].long()


@dataclass(frozen=True, eq=False)
class Relative(Change, prepared=False):
    """A table over buckets of offsets along one axis; see `relative`."""

    kind = "relative"
    order = 3
    table: Tensor
    bucket: Bucket
    _made: BoundedDict = field(default_factory=lambda: BoundedDict(1), repr=False)
    sums: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.table,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Change:
        return replace(self, table=tensors[0])

    def prepared(self, sizes: Sizes) -> Codes:
        per_head(self.table, "table", sizes)
        if torch.compiler.is_compiling():  # compiled code computes the arrays anew, without reading them
            return Codes(self.table, *self._codes(sizes))
        key = sizes.q_len, sizes.k_len, sizes.device, self.sums
        made = self._made.get(key)  # looked up once: other threads may replace it
        if made is None:
            with torch.inference_mode(False):  # otherwise a later training step could not use them
                made = self._codes(sizes)
                if made[0].is_meta and not isinstance(made[0], FakeTensor):
                    made = self._as_on_a_gpu(sizes, made)
            if isinstance(made[0], FakeTensor):
                return Codes(self.table, *made)
            if len(made[0]) and have_contents(made[0]):
                self._check_range(made[0])
                made = (*made[:3], self._runs(*made[::3]) if len(made[3]) else made[3])
            self._made[key] = made
        return Codes(self.table, *made)

    def _as_on_a_gpu(self, sizes: Sizes, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Meta arrays with the sizes that the arrays have on a GPU, because kernels are chosen by these sizes.

        Returns `made` if the bucket function reads meta tensors, which have no contents.
        """
        here = sizes._replace(device=torch.device("cpu"))
        try:
            codes = self._codes(here)
        except (RuntimeError, ValueError):  # the bucket function may return meta tensors
            return made
        if not len(codes[0]) or not have_contents(codes[0]):
            return made
        self._check_range(codes[0])
        until = self._runs(*codes[::3]) if len(codes[3]) else codes[3]
        return tuple(x.to(sizes.device) for x in (*codes[:3], until))

    def _codes(self, sizes: Sizes) -> tuple[Tensor, ...]:
        q_len, k_len, device = sizes.q_len, sizes.k_len, sizes.device
        if q_len + k_len > MOST_TOKENS:
            raise ValueError(
                f"q and k must have at most 2^31 - 257 tokens together for a table of relative positions; got {q_len} "
                f"and {k_len}. Crop the sequence, or use scores.function."
            )
        offsets = (k_len - 1) - torch.arange(max(0, q_len + k_len - 1), device=device) - (k_len - q_len)
        q_codes = torch.arange(q_len, dtype=torch.int32, device=device) + (k_len - 1)
        is_even = True
        if self.sums is not None:  # scores between sequences are dead: any bucket will do for them
            places = Packed(*self.sums)
            is_even = places.is_even
            if not is_even:
                first = places.first
                offsets = (k_len - 1) - first - torch.arange(max(0, 2 * k_len - 1 - first), device=device)
                aligned = torch.arange(q_len, device=device) + places.shifts(device)
                q_codes = (aligned + (k_len - 1) - first).to(torch.int32)
            offsets = offsets.clamp(*places.offsets)
        buckets = self.bucket(offsets)
        checked_integers(buckets, "what bucket returns")
        if buckets.device != offsets.device:
            raise ValueError(
                f"what bucket returns must be on the device of the offsets, {offsets.device}; it is on "
                f"{buckets.device}."
            )
        if buckets.shape != offsets.shape:
            raise ValueError(
                f"bucket must return one integer for each of the {len(offsets)} offsets; got {list(buckets.shape)}."
            )
        k_codes = torch.arange(k_len, dtype=torch.int32, device=device)
        until = ends_of_runs(buckets) if is_even else buckets[:0].to(torch.int32)
        return buckets.to(torch.int32), q_codes, k_codes, until

    def _check_range(self, buckets: Tensor) -> None:
        most = self.table.shape[1]
        if not 0 <= int(buckets.min()) <= int(buckets.max()) < most:
            raise ValueError(
                f"bucket must return numbers from 0 to {most - 1}, the table's columns; "
                f"got {int(buckets.min())} to {int(buckets.max())}."
            )

    def _runs(self, buckets: Tensor, until: Tensor) -> Tensor:
        """`until`; or nothing if buckets change so often (`offsets % 3`) that kernels are faster going through the
        buckets."""
        runs = 1 + int((buckets[1:] != buckets[:-1]).sum())
        return until[:0] if runs > max(4 * self.table.shape[1], len(buckets) // _LONG_RUN) else until


def ends_of_runs(x: Tensor) -> Tensor:
    """The last place of the run of equal numbers around every place, then the first place of the last run; int32.

    >>> ends_of_runs(torch.tensor([7, 7, 7, 3, 7, 7])).tolist()
    [2, 2, 2, 3, 5, 5, 4]
    """
    places = torch.arange(len(x), device=x.device)
    is_last = torch.ones_like(places, dtype=torch.bool)
    is_last[:-1] = x[1:] != x[:-1]
    ends = torch.where(is_last, places, len(x)).flip(0).cummin(0).values.flip(0)
    last_run = (ends < ends[-1:]).sum(0, keepdim=True)
    return torch.cat([ends, last_run]).to(torch.int32)


def relative(table: Tensor, bucket: Bucket) -> Relative:
    """Adds `table[h, bucket(j - i - (Nk - Nq))]` to the score of query i and key j in head h.

    >>> from sparseflash import attention, scores
    >>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
    >>> table = torch.randn(2, 32, requires_grad=True)
    >>> attention(q, k, v, scores=scores.relative(table, scores.t5_buckets(32, 128))).shape
    torch.Size([1, 2, 100, 16])
    >>> scores.relative(torch.randn(2, 9), scores.clipped(4)).kind  # distances past 4 share the outermost entries
    'relative'

    Args:
        table: `[Hq, R]`, which may be learned.
        bucket: takes all offsets of keys from queries, int64 `[Nq + Nk - 1]`, and returns the bucket of each, below
            R. It is called once for given lengths. The last query is at the position of the last key.

    Raises ValueError for buckets outside the table.
    """
    table = floating(table, "table")
    if table.ndim != 2:
        raise ValueError(f"table must have shape [Hq, R]; got {list(table.shape)}. An embedding is its transpose.")
    if not callable(bucket):
        raise TypeError(f"bucket must be a function of offsets, such as scores.clipped(128); got {bucket!r}.")
    return Relative(table, bucket)


def clipped(most: int) -> Bucket:
    """Buckets for a table of `2 * most + 1` entries: the offset, clipped to `-most .. most`, plus `most`.

    >>> clipped(2)(torch.tensor([-9, -1, 0, 5])).tolist()
    [0, 1, 2, 4]

    Source: Shaw, Uszkoreit and Vaswani, "Self-Attention with Relative Position Representations", 2018.
    """
    return partial(_clipped, most=integer(most, "most", "tokens"))


def _clipped(offsets: Tensor, most: int) -> Tensor:
    return offsets.clamp(-most, most) + most


def t5_buckets(count: int = 32, max_distance: int = 128, *, bidirectional: bool = True) -> Bucket:
    """T5's buckets: one for each small distance, logarithmically wider ones up to `max_distance`, one for all beyond.

    >>> t5_buckets(8, 16)(torch.tensor([-100, -1, 0, 1, 3, 100])).tolist()
    [3, 1, 0, 5, 6, 7]

    Args:
        count: the number of buckets.
        max_distance: tokens.
        bidirectional: half of the buckets are for keys after the query; otherwise these share bucket 0.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", JMLR
    2020, and its code, which rounds as this does.
    """

    count, max_distance = integer(count, "count", "buckets"), integer(max_distance, "max_distance", "tokens")
    half = count // 2 if bidirectional else count
    if half < 2:
        raise ValueError(f"count must be at least {4 if bidirectional else 2} buckets; got {count}.")
    if max_distance <= half // 2:
        raise ValueError(
            f"max_distance must be more than {half // 2} tokens, which have buckets of their own with count={count}; "
            f"got {max_distance}."
        )
    return partial(_t5_bucket, half=half, max_distance=max_distance, bidirectional=bidirectional)


def _t5_bucket(offsets: Tensor, half: int, max_distance: int, bidirectional: bool) -> Tensor:
    if bidirectional:
        start, distance = (offsets > 0).to(torch.int64) * half, offsets.abs()
    else:
        start, distance = torch.zeros_like(offsets), (-offsets).clamp(min=0)
    exact = half // 2
    # In fp32, as in the models' own code: fp64 would put some distances into other buckets.
    steps = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (half - exact)
    large = (exact + steps.to(torch.int64)).clamp(max=half - 1)
    return start + torch.where(distance < exact, distance, large)
