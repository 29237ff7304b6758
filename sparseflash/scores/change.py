"""The base of all score modifications, and how they combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from sparseflash.blockmask.arguments import dense_tensor

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask

Learned = Sequence[Tensor | None]
_LANES = 64
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Place(NamedTuple):
    """Where scores lie: integers that broadcast to their shape."""

    batch: Tensor
    head: Tensor
    query: Tensor
    key: Tensor
    shift: int  # Nk - Nq: the last query is at the position of the last key, as in causal masks
    tile: Tensor | None = None  # the number of the score's tile in the mask's list, if the backend has it

    @classmethod
    def everywhere(cls, shape: Sequence[int], device: torch.device) -> Place:
        """The places of scores of the shape `[B, Hq, Nq, Nk]`."""
        b, h, q, k = (torch.arange(n, device=device) for n in shape)
        return cls(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q.view(-1, 1), k, shape[3] - shape[2])

    @property
    def distance(self) -> Tensor:
        return (self.query + self.shift - self.key).abs()


class Sizes(NamedTuple):
    """The sizes, dtype and device of an attention."""

    batch: int
    heads: int
    q_len: int
    k_len: int
    device: torch.device
    mask: BlockMask | None = None


@dataclass(frozen=True, eq=False)
class Change:
    """A score modification: its fields are tensors and numbers; the tensors may require gradients."""

    kind: ClassVar[str]
    # The place among others: 0 divides, 1 caps, 2 to 6 add, 7 replaces the score, 8 joins the softmax.
    order: ClassVar[int]
    types: ClassVar[dict[str, type[Change]]] = {}  # of changes as backends take them, by kind

    def __init_subclass__(cls, prepared: bool = True) -> None:
        if prepared:
            Change.types[cls.kind] = cls

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, in the order in which `with_tensors` takes them."""
        raise NotImplementedError

    def numbers(self) -> tuple[float, ...]:
        return ()

    @classmethod
    def of(cls, tensors: Sequence[Tensor], numbers: Sequence[float]) -> Change:
        return cls(*tensors, *numbers)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Change:
        return self.of(tensors, self.numbers())

    def prepared(self, sizes: Sizes) -> Change:
        """The change as backends take it. Raises ValueError if it does not fit an attention of these sizes."""
        return self

    def joined(self, other: Change) -> Change:
        raise NotImplementedError

    def changed(self, scores: Tensor, at: Place) -> Tensor:
        raise NotImplementedError

    def gradient(self, gradient: Tensor, scores: Tensor, changed: Tensor, at: Place, learned: Learned) -> Tensor:
        """The gradient by the scores, given the gradient by the changed scores; adds to the tensors' in `learned`."""
        return gradient

    def __add__(self, other: Change | Scores) -> Scores:
        return Scores((self,)) + other


@dataclass(frozen=True, eq=False)
class Scores:
    """Score modifications, in the order in which they are applied, whatever the order in which they were added.

    >>> from sparseflash import scores
    >>> both = scores.alibi(torch.ones(2)) + scores.softcap(50.0)
    >>> both.kinds, both.kinds == (scores.softcap(50.0) + scores.alibi(torch.ones(2))).kinds
    (('softcap', 'distance'), True)

    The order: `temperature` divides; `softcap` caps; then `distance` (`alibi`, `log_decay`), `relative`, `key_bias`,
    `bias` and `tile_bias` add; `function` replaces the score; last, `sink` joins the softmax. At most one of each kind;
    to use two biases, add their tensors. (A `bias` that is the same for all queries becomes a `key_bias`, and is added
    to a given one.)
    """

    changes: tuple[Change, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(change.kind for change in self.changes)

    def __add__(self, other: Change | Scores) -> Scores:
        added = scores_of(other).changes
        for kind in {change.kind for change in added} & set(self.kinds):
            raise ValueError(
                f"scores must have at most one change of each kind; got two of {kind}. Add their tensors, or write "
                "scores.function."
            )
        return Scores(tuple(sorted((*self.changes, *added), key=lambda change: (change.order, change.kind))))

    def prepared(self, sizes: Sizes) -> Scores:
        """The changes as backends take them. Raises ValueError if one does not fit an attention of these sizes."""
        changes: list[Change] = []
        for change in (each.prepared(sizes) for each in self.changes):
            if changes and changes[-1].kind == change.kind:  # a bias that is the same for all queries
                change = changes.pop().joined(change)
            changes.append(change)
        return Scores(tuple(changes))

    def changed(self, scores: Tensor, at: Place) -> Tensor:
        return self.steps(scores, at)[-1]

    def steps(self, scores: Tensor, at: Place) -> list[Tensor]:
        found = [scores]
        for change in self.changes:
            found.append(change.changed(found[-1], at))
        return found

    def gradient(self, gradient: Tensor, steps: Sequence[Tensor], at: Place, learned: Learned) -> Tensor:
        """The gradient by `steps[0]`, given the gradient by the last step; adds the gradients of `tensors()` to
        `learned`.
        """
        stop = len(learned)
        for number, change in reversed(list(enumerate(self.changes))):
            start = stop - len(change.tensors())
            before, after = steps[number], steps[number + 1]
            gradient, stop = change.gradient(gradient, before, after, at, learned[start:stop]), start
        return gradient

    def find(self, kind: str) -> Any:
        return next((change for change in self.changes if change.kind == kind), None)

    def without(self, kind: str) -> Scores:
        return Scores(tuple(change for change in self.changes if change.kind != kind))

    def tensors(self) -> list[Tensor]:
        return [x for change in self.changes for x in change.tensors()]

    def key(self) -> tuple[Any, ...]:
        """Everything but the values of the tensors, for caches; with types, because `prepared` replaces some changes by
        others.
        """
        key: list[Any] = []
        for change in self.changes:
            key += type(change), change.numbers(), getattr(change, "identity", None)
            for x in change.tensors():
                key += x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16
        return tuple(key)

    def by_kind(self, wanted: Sequence[bool]) -> dict[str, list[bool]]:
        left = iter(wanted)
        return {change.kind: [next(left, False) for _ in change.tensors()] for change in self.changes}

    def described(self) -> str:
        """Everything but the tensors, as a text.

        >>> from sparseflash import scores
        >>> (scores.alibi(torch.ones(2)) + scores.softcap(50.0)).described()
        'softcap 0 50.0;distance 1 0'
        """
        return ";".join(
            " ".join([change.kind, str(len(change.tensors())), *map(repr, change.numbers())]) for change in self.changes
        )

    def with_tensors(self, tensors: Sequence[Tensor]) -> Scores:
        changes, rest = [], iter(tensors)
        for change in self.changes:
            changes.append(change.with_tensors([next(rest) for _ in change.tensors()]))
        return Scores(tuple(changes))


PAIRS = ("bias", "tile_bias")  # kinds that have a number for every pair of a query and a key
# Kinds whose tensors `packed.py`, `rows.py` and `distributed/scores.py` place where a call has the tokens and heads.
PLACED = ("temperature", "softcap", "distance", "relative", "key_bias", *PAIRS, "function", "sink")


def check_placed(changes: Scores, where: str) -> None:
    """Raises ValueError for a kind that is not in PLACED: it would silently see the places of other tokens or heads."""
    if others := [kind for kind in changes.kinds if kind not in PLACED]:
        raise ValueError(f"scores {where} must be of {', '.join(PLACED)}; got {others[0]}.")


def scores_of(given: object) -> Scores:
    """The argument `scores` of a caller, or TypeError."""
    if isinstance(given, Scores):
        return given
    if isinstance(given, Change):
        return Scores((given,))
    raise TypeError(
        f"scores must be made by sparseflash.scores, such as scores.alibi(slopes); got {type(given).__name__}. "
        "scores.bias takes a tensor that is added to the scores, scores.function a function, and "
        "interop.from_score_mod a score_mod of FlexAttention; + joins several changes."
    )


def floating(x: object, name: str) -> Tensor:
    """A dense tensor of a floating dtype, or TypeError."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATING:
        what = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a tensor of a floating dtype; got {what}.")
    return dense_tensor(x, name)


def per_head(x: Tensor, name: str, sizes: Sizes) -> None:
    """Raises ValueError unless `x [Hq, ...]` has one entry a head and lies on q's device."""
    if x.shape[0] != sizes.heads:
        raise ValueError(f"{name} must have one entry for each of the {sizes.heads} query heads; got {x.shape[0]}.")
    on_device(x, name, sizes)


def on_device(x: Tensor, name: str, sizes: Sizes) -> None:
    """Raises ValueError unless a tensor lies on q's device."""
    if x.device != sizes.device:
        raise ValueError(f"{name} must be on q's device {sizes.device}; it is on {x.device}.")


def broadcasts(x: Tensor, name: str, letters: str, wanted: Sequence[int], sizes: Sizes) -> None:
    """Raises ValueError unless each size of `x` is 1 or the attention's, and x lies on q's device."""
    # Not `in`: torch.compile (PyTorch 2.13) evaluates `4 in (1, n)` to False if n may change, whatever its value.
    if x.ndim != len(wanted) or any(1 != own != size for own, size in zip(x.shape, wanted)):
        raise ValueError(f"{name} must have shape [{letters}], here {list(wanted)} or 1 instead; got {list(x.shape)}.")
    on_device(x, name, sizes)


def add_at(zeros: Tensor | None, indices: Sequence[Tensor], values: Tensor) -> None:
    """Adds values to `zeros[indices]`, one after another; None: nowhere."""
    if zeros is None:
        return
    flat = torch.zeros((), dtype=torch.int64, device=zeros.device)
    for index, stride in zip(indices, zeros.stride(), strict=True):
        flat = flat + index * stride
    shared = [axis for axis, n in enumerate((1,) * (values.ndim - flat.ndim) + tuple(flat.shape)) if n == 1]
    if shared:  # values for the same place are summed first, which is faster and more accurate
        values = values.sum(shared, keepdim=True)
    flat, values = flat.expand(values.shape).reshape(-1), values.reshape(-1).to(zeros.dtype)
    if zeros.numel() * _LANES > values.numel():
        zeros.view(-1).index_add_(0, flat, values)
        return
    # One long sum loses digits, so the values of few entries are summed in lanes first.
    lane = torch.arange(len(values), device=values.device) % _LANES
    sums = values.new_zeros(_LANES * zeros.numel()).index_add_(0, flat + lane * zeros.numel(), values)
    zeros += sums.view(_LANES, *zeros.shape).sum(0)


def shared_or_own(x: Tensor, indices: Sequence[Tensor]) -> list[Tensor]:
    """The indices, with 0 for dimensions of size 1."""
    # One-dimensional zeros, because PyTorch reads a 0-dimensional index, which the meta device cannot.
    return [torch.zeros(1, dtype=torch.int64, device=i.device) if n == 1 else i for n, i in zip(x.shape, indices)]


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
