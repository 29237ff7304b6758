"""The interface between the kernels and a score modification: its device functions and their arguments.

Each kind has a file in this folder with its device functions, whose first two arguments are compile-time constants:
`CHANGES`, and `NUMBER`, the index of this modification; its constants are `CHANGES.kinds[NUMBER].FACT`. The other
arguments:

- `begin(args)`: called once in each program. The other functions find its result as `args.begun`.
- `load(args, at, BLOCK_Q, BLOCK_K, TILE_M, TILE_N, MASKED, TRANSPOSED)`: called before the matrix product of a tile.
  Its result is passed to `apply` as `read`.
- `apply(args, read, scores, at, TILE_M, TILE_N, TRANSPOSED)`: returns `(new scores, kept)`; `kept` is passed to
  `gradient`. Scores are `[keys, queries]` if TRANSPOSED.
- `start(TILE)`: called before the first tile. Returns the sums that a program keeps for its tile of TILE tokens.
- `gradient(args, sums, ds, kept, at, BLOCK_Q, BLOCK_K, MASKED)`: returns `(ds, new sums)`. `ds` comes in as the
  gradient of the modified scores and is returned as the gradient of the scores before the modification.
- Called after the last tile; writes the sums at `place`, the number of the program or of its list; if CUT, zeros for
  tokens at or past `length`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparseflash.backends.triton.portable.learned import Call
    from sparseflash.backends.triton.schedule.plan import Plan

# "forward" is also for the pass that recomputes delta, which needs no gradients of the score modifications.
Part = Literal["forward", "rows", "columns"]
FUNCTIONS = ("begin", "load", "apply", "start", "gradient", "finish")
# Those of the Hopper kernels, see `hopper.py`.
HOPPER_FUNCTIONS = (
    "buffers", "record", "load_with_keys", "load_last", "no_item", "begin_item", "begin_tile", "multiply", "apply",
    "apply_masked", "of_rows", "finish_rows",
)  # fmt: skip
HOPPER_BACKWARD_FUNCTIONS = (
    "buffers", "begin", "send", "load_last", "start", "begin_tile", "apply", "apply_masked", "of_rows", "derivative",
    "gradient", "store", "gradient_later", "finish_head", "finish",
)  # fmt: skip
_KNOWN = tuple(dict.fromkeys(FUNCTIONS + HOPPER_FUNCTIONS + HOPPER_BACKWARD_FUNCTIONS))
# The kernels' integer arguments for the score modifications of a call. Triton would specialise on integers in a tuple.
WHOLE_NUMBERS = tuple(f"n{number}" for number in range(8))


class At(NamedTuple):
    """The position of a tile of scores."""

    batch: Any
    head: Any
    batch_head: Any
    first_q: Any  # see loads.py for first_q and first_k
    first_k: Any
    q_len: Any
    k_len: Any
    q_length: Any  # live queries of the sequence; None without lengths


class Arguments(NamedTuple):
    """The arguments `args` of a device function."""

    tensors: Any  # from `Kind.tensors`
    numbers: Any  # `Kind.numbers`, followed by `Kind.numbers_of_rows` in dq_kernel
    whole: Any  # `Kind.whole`
    learned: Any  # memory for the gradients of tensors, from `Kind.memory`
    begun: Any  # the result of `begin`


class Request(NamedTuple):
    """The sizes of the attention that score modifications are prepared for."""

    batch: int
    heads: int
    q_len: int
    k_len: int
    dtype: torch.dtype
    device: torch.device
    block: tuple[int, int] | None = None  # of the mask, or None if it has lengths


class Memory(NamedTuple):
    """Memory for the gradients of tensors, by the kernel that writes it; empty if no tensor is learned."""

    rows: tuple[Tensor, ...] = ()  # dq_kernel
    columns: tuple[Tensor, ...] = ()  # dk_dv_kernel


class Kind:
    """One score modification, prepared for tensors of one layout."""

    numbers: tuple[Any, ...] = ()  # floats, and strides; Triton may specialise on these
    numbers_of_rows: tuple[Any, ...] = ()  # further ones for dq_kernel alone
    whole: tuple[int, ...] = ()  # integers that Triton must not specialise on
    learned = Memory()  # examples, on the meta device

    def __init__(self, applied: Mapping[str, Any]) -> None:
        """applied: `begin`, `load` and `apply`; empty for a sink, which changes no scores."""
        self.applied = dict(applied)
        self.rows: dict[str, Any] = {}  # `start`, `gradient` and `finish` in dq_kernel
        self.columns: dict[str, Any] = {}  # and in dk_dv_kernel
        self.facts: dict[str, Any] = {}  # compile-time constants of the device functions, by upper-case names

    def functions(self, part: Part) -> Functions:
        of_gradient = {"forward": {}, "rows": self.rows, "columns": self.columns}[part]
        return Functions({**self.applied, **of_gradient}, self.facts, len(self.whole))

    def tensors(self, change: Any, device: torch.device) -> tuple[Tensor, ...]:
        return ()

    def planned(self, plan: Plan) -> Any:
        return None

    def memory(self, change: Any, call: Call, planned: Any) -> Memory:
        return Memory()

    def gradients(self, change: Any, call: Call, written: Memory) -> list[Tensor | None]:
        """The gradient of each tensor of the score modification."""
        return [None] * len(change.tensors())


class Functions:
    """The device functions of one score modification in one kernel, None for missing ones, and their constants."""

    def __init__(self, functions: Mapping[str, Any], facts: Mapping[str, Any], whole: int) -> None:
        if unknown := {*functions} - {*_KNOWN}:
            raise TypeError(f"device functions of a change must be from {_KNOWN}; got {sorted(unknown)}.")
        self.__dict__.update({**dict.fromkeys(_KNOWN), **functions, **facts})
        self.WHOLE = whole
        self.key = whole, sorted((name, _key(x)) for name, x in {**functions, **facts}.items())


class Changes:
    """All score modifications of a kernel, in the order in which they are applied.

    Triton's cache on disk identifies a compile-time argument by its `cache_key`, or by its `str`, which of a device
    function is only its name: with a plain tuple, an edited function would still run its old machine code.
    """

    def __init__(self, kinds: Sequence[Functions]) -> None:
        self.kinds = tuple(kinds)
        self.BACKWARDS = tuple(reversed(range(len(kinds))))
        self.STARTS = tuple(sum(each.WHOLE for each in kinds[:number]) for number in range(len(kinds)))
        if sum(each.WHOLE for each in kinds) > len(WHOLE_NUMBERS):
            raise RuntimeError("the changes have more whole numbers than the kernels have arguments for them")
        self.cache_key = hashlib.sha256(repr([each.key for each in kinds]).encode()).hexdigest()

    def __repr__(self) -> str:  # within one process, Triton identifies compile-time arguments by their repr
        return f"Changes({self.cache_key})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Changes) and self.cache_key == other.cache_key

    def __hash__(self) -> int:
        return hash(self.cache_key)


def _key(x: Any) -> str:
    return str(getattr(x, "cache_key", None) or repr(x))
