"""The interface between the Hopper forward and a score modification: its device functions, facts and arguments.

As `kind.py` for the portable kernels: the forward takes all score modifications as one compile-time object and does not
depend on their kinds. Each kind has a `HopperKind` in its file. The first two arguments of every device function are
CHANGES and NUMBER; `args` are `(tensors, numbers, integers, descriptor)`; the functions of one kind share no other
state than what they return. The loading warp calls

- `buffers(args, BLOCK_N, STAGES, GROUPS)`: allocates shared memory and its barriers; the others get the result.
- `record(args, record, number, head, q_len, k_len)`: writes OF_CHANGE_FIRST and OF_CHANGE_SECOND of an item's
  record. At most one of the score modifications of a call has it.
- `load_with_keys(args, buffers, stage, bar, batch, head, first_k)`: loads what belongs to a step's keys; the barrier of
  the keys expects BYTES_OF_KEY for each key.
- `load_last(args, buffers, step, is_item, batch, head, first_q, first_k, GROUPS, BLOCK_N)`: loads after keys and
  values, with barriers of its own.

The warpgroups call, with `item` = `(record_s, turn, q_len, k_len - q_len, qk_scale)` and C, the number of the
warpgroup:

- `no_item()`, `begin_item(args, item, C, BLOCK_N)`: what is kept of an item, a tuple of numbers.
- `begin_tile(args, of_item, block, item, C, BLOCK_N)`: `(what is kept of a tile, whether apply_masked must change it)`.
- `multiply(args, buffers, s, stage, Q)`: adds a matrix product to the scores, which may be in flight. Q: the layout of
  its first operand.
- `apply(args, buffers, s, of_tile, step, C)`: `(new scores, new of_tile)`.
- `apply_masked(args, s, of_tile, block, item, C, BLOCK_N)`: new scores, in tiles that are masked by bits.
- `of_rows(args, s, of_tile, item, BLOCK_N)`: `(new scores, what is to be added to them)`: a number for the tile, or one
  for each thread of a row if BY_THREAD.
- `finish_rows(args, maximum, total, head)`: `(maximum, total, factor of the accumulator)` at the end of an item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sparseflash.backends.triton.changes.kind import WHOLE_NUMBERS, Changes, Functions


class HopperKind(NamedTuple):
    """One kind of score modification in the Hopper forward."""

    functions: Mapping[str, Any]
    facts: Mapping[str, Any] = {}
    # Names of its tensors, floats, integers and of its descriptor.
    tensors: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    descriptor: str | None = None
    reads_blocks: bool = False  # whether its functions need the number of the tile
    # Whether the branch for masked tiles needs a shuffle, without which ptxas would predicate it.
    keeps_branch: bool = False
    # How the softmax keeps maxima: times qk_scale; so, but by a coarser scale where they are large; or without the
    # scale. Where all scores of a query are as low as a bias can be, a fused multiplication and subtraction of the
    # maximum would leave an arbitrary number instead of 0.
    maxima: Literal["scaled", "coarse", "unscaled"] = "scaled"
    may_be_nan: bool = False  # past the lengths
    by_thread: bool = False
    bytes_of_key: int = 0


class HopperChanges(Changes):
    """All score modifications of the Hopper forward, and what they are together."""

    def __init__(self, kinds: Sequence[HopperKind]) -> None:
        super().__init__([Functions(each.functions, each.facts, len(each.whole)) for each in kinds])
        self.HAVE_DESCRIPTORS = tuple(each.descriptor is not None for each in kinds)
        self.READS_BLOCKS = any(each.reads_blocks for each in kinds)
        self.KEEPS_BRANCH = any(each.keeps_branch for each in kinds)
        self.MAY_BE_NAN = any(each.may_be_nan for each in kinds)
        self.BY_THREAD = any(each.by_thread for each in kinds)
        self.BYTES_OF_KEY = sum(each.bytes_of_key for each in kinds)
        maxima = {each.maxima for each in kinds}
        self.MAY_BE_COARSE = "coarse" in maxima
        self.KEEPS_UNITS = "unscaled" in maxima or (self.MAY_BE_COARSE and self.BY_THREAD)
        facts = {name: x for name, x in self.__dict__.items() if name.isupper()}
        self.cache_key = f"{self.cache_key} {sorted(facts.items())}"


class HopperChanged:
    """The score modifications of one layout, as the Hopper forward takes them."""

    def __init__(self, kinds: Sequence[HopperKind]) -> None:
        self.kinds = tuple(kinds)
        self.constant = HopperChanges(kinds)
        self._descriptor = next((each.descriptor for each in kinds if each.descriptor is not None), None)

    def numbers(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The kernel's numbers, from the score modifications' own by their names."""
        if not self.kinds:
            return {}
        whole = [found[name] for each in self.kinds for name in each.whole]
        numbers = tuple(tuple(float(found[name]) for name in each.numbers) for each in self.kinds)
        return {"change_numbers": numbers, **dict(zip(WHOLE_NUMBERS, whole))}

    def tensors(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The kernel's tensors, or examples of them, in the same way."""
        if not self.kinds:
            return {}
        given: dict[str, Any] = {"changes": tuple(tuple(found[name] for name in each.tensors) for each in self.kinds)}
        if self._descriptor is not None:
            given["change_desc"] = found[self._descriptor]
        return given
