"""What a change of scores is to the kernels: device functions that they call, and what the host passes to them.

Kernels take all changes of a call as one compile-time object, `Changes`, and know no kind by name. A file of this
folder writes the device functions of one change. All get two compile-time arguments first: `CHANGES`, and `NUMBER`, the
place of this change in it; so they read a fact of their change as `CHANGES.kinds[NUMBER].FACT`. After these come:

- `begin(args)`: once in each program. Returns what the other functions find as `args.begun`.
- `load(args, at, BLOCK_Q, BLOCK_K, TILE_M, TILE_N, MASKED, TRANSPOSED)`: before the products of a tile. Returns what
  `apply` gets as `read`.
- `apply(args, read, scores, at, TILE_M, TILE_N, TRANSPOSED)`: returns the changed scores, and what `gradient` gets as
  `kept`. Scores are `[keys, queries]` if TRANSPOSED.
- `start(TILE)`: before the first tile. Returns the sums that a program keeps for its tile of TILE tokens.
- `gradient(args, sums, ds, kept, at, BLOCK_Q, BLOCK_K, MASKED)`: returns the gradient of the scores before the change,
  from that of the changed ones, and the new sums.
- `finish(args, sums, place, first, length, TILE, CUT)`: after the last tile. Writes the sums at `place`, the number of
  the program or of its list; if CUT, zeros for tokens at or past `length`.

`args` are `Arguments`, `at` is `At`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from sparseflash.scores.change import Change

if TYPE_CHECKING:
    from sparseflash.backends.triton.portable.learned import Call
    from sparseflash.backends.triton.schedule.plan import Plan

# The forward, and the pass that recomputes delta, change scores only; the two kernels of the backward have gradients.
Part = Literal["forward", "rows", "columns"]
FUNCTIONS = ("begin", "load", "apply", "start", "gradient", "finish")
# So many whole numbers can all changes of a call have together. In a tuple Triton would compile for their values.
WHOLE_NUMBERS = tuple(f"n{number}" for number in range(8))


class At(NamedTuple):
    """Where the scores of a tile stand."""

    batch: Any
    head: Any
    batch_head: Any
    first_q: Any  # see loads.py for first_q and first_k
    first_k: Any
    q_len: Any
    k_len: Any
    q_length: Any  # live queries of the sequence, if there are lengths; or None


class Arguments(NamedTuple):
    """What a device function gets of its change."""

    tensors: Any  # what `Kind.tensors` returns
    numbers: Any  # `Kind.numbers`, and in a backward over rows then `Kind.numbers_of_rows`
    whole: Any  # `Kind.whole`
    learned: Any  # memory for the gradients of tensors, as `Kind.memory` returns it for this kernel
    begun: Any  # what `begin` returned


class Request(NamedTuple):
    """The attention for which changes are prepared."""

    batch: int
    heads: int
    q_len: int
    k_len: int
    dtype: torch.dtype
    device: torch.device
    block: tuple[int, int] | None = None  # of the mask, or None if it has lengths


class Kind:
    """One change of scores, prepared for tensors of one layout."""

    numbers: tuple[Any, ...] = ()  # fractions, and strides, for which Triton may compile
    numbers_of_rows: tuple[Any, ...] = ()
    whole: tuple[int, ...] = ()
    # Examples of the memory for gradients, on the meta device; empty if none are learned.
    learned_rows: tuple[Tensor, ...] = ()
    learned_columns: tuple[Tensor, ...] = ()

    def __init__(self, applied: Mapping[str, Any]) -> None:
        """applied: `begin`, `load` and `apply`; empty for what changes no scores, as a sink."""
        self.applied = dict(applied)
        self.rows: dict[str, Any] = {}  # `start`, `gradient` and `finish` in the backward over rows
        self.columns: dict[str, Any] = {}  # in the backward over columns
        self.facts: dict[str, Any] = {}  # what device functions read at compile time, by upper-case names

    def functions(self, part: Part) -> Functions:
        """The device functions of one kernel."""
        of_gradient = {"forward": {}, "rows": self.rows, "columns": self.columns}[part]
        return Functions({**self.applied, **of_gradient}, self.facts, len(self.whole))

    def tensors(self, change: Any, device: torch.device) -> tuple[Tensor, ...]:
        """The tensors of a call that kernels read."""
        return ()

    def planned(self, plan: Plan) -> Any:
        """What `memory` needs to know of a plan."""
        return None

    def memory(self, change: Any, call: Call, planned: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Memory for the gradients of one call: what dq_kernel writes, and what dk_dv_kernel writes."""
        return (), ()

    def gradients(
        self, change: Change, call: Call, rows: Sequence[Tensor], columns: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The gradient of each tensor of the change, from what the kernels wrote to `memory`."""
        return [None] * len(change.tensors())


class Functions:
    """The device functions of one change in one kernel, None where there is none, and the facts they read."""

    begin = load = apply = start = gradient = finish = None

    def __init__(self, functions: Mapping[str, Any], facts: Mapping[str, Any], whole: int) -> None:
        """whole: how many whole numbers the change has."""
        if unknown := {*functions} - {*FUNCTIONS}:
            raise TypeError(f"device functions of a change must be from {FUNCTIONS}; got {sorted(unknown)}.")
        self.__dict__.update(functions)
        self.__dict__.update(facts)
        self.WHOLE = whole
        self.key = whole, sorted((name, _key(x)) for name, x in {**functions, **facts}.items())


class Changes:
    """All changes of scores of a kernel, in the order in which they are applied.

    Triton's cache on disk takes a compile-time argument by its `cache_key`, and one without by its text. The text of a
    device function is its name; so a tuple of functions would get the machine code of those of the same names before an
    edit.
    """

    def __init__(self, kinds: Sequence[Functions]) -> None:
        self.kinds = tuple(kinds)
        self.BACKWARDS = tuple(reversed(range(len(kinds))))
        self.STARTS = tuple(sum(each.WHOLE for each in kinds[:number]) for number in range(len(kinds)))
        if sum(each.WHOLE for each in kinds) > len(WHOLE_NUMBERS):
            raise RuntimeError("the changes have more whole numbers than the kernels have arguments for them")
        self.cache_key = hashlib.sha256(repr([each.key for each in kinds]).encode()).hexdigest()

    def __repr__(self) -> str:  # Triton tells compile-time arguments of one process apart by their texts
        return f"Changes({self.cache_key})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Changes) and self.cache_key == other.cache_key

    def __hash__(self) -> int:
        return hash(self.cache_key)


def _key(x: Any) -> str:
    """What tells a device function, or a fact, from others; in the interpreter functions have no key of their own."""
    return str(getattr(x, "cache_key", None) or repr(x))
