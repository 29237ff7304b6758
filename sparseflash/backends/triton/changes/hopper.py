"""The interface between the Hopper kernels and a score modification: its device functions, facts and arguments.

As `kind.py` for the portable kernels: each kernel takes all score modifications as one compile-time object and does not
depend on their kinds. Each kind has a `HopperKind` in its file, prepared for one kernel. The first two arguments of
every device function are CHANGES and NUMBER; the functions of one kind share no other state than what they return.

The forward. `args` are `(tensors, numbers, integers, descriptor)`. The loading warp calls

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
  for each thread of a row if `adds` is "threads".
- `finish_rows(args, maximum, total, head)`: `(maximum, total, factor of the accumulator)` at the end of an item.

The backward, where rows of scores are keys. `args` are `(tensors, numbers, integers, descriptor, memory for gradients,
descriptor of gradients)`, `of_tokens` `(qk_scale, queries, keys minus queries of a sequence)`. The loading warp calls

- `buffers(args, ROWS, KEYS)`: as in the forward.
- `begin(args, of_tokens)`: once a program; `tell` gets the result.
- `tell(args, begun, place, of_tokens, ROWS)`: `(numbers for the warpgroups, what load_last gets)` of a step. `place`:
  `(batch, head, number of the head in its group, first query, first key)`. The warpgroups read the `told` numbers by
  `record.heard_of`.
- `load_last(args, buffers, step, kept)`: loads after queries and dout, with barriers of its own.

The warpgroups call, with `step` = `(number_s, stage, number of the step, of_tokens)`:

- `start(no_scores)`: sums for the gradients of tensors, without a gradient: every item begins with them. no_scores:
  zeros in the layout of scores.
- `begin_tile(args, step, no_scores)`: what is kept of a tile.
- `apply(args, buffers, s, of_tile, step)`: new scores.
- `apply_masked(args, s, of_tile)`: `(new scores, new of_tile)`, in tiles that are masked.
- `of_rows(args, s, of_tile, qk_scale)`: `(new scores, what is to be added to exponents, new of_tile)`; see `adds`.
- `derivative(args, p, s, of_tile)`: p times the derivative of the modified scores s. Where one has it, s does not
  include -lse, and dead scores are `backward.DEAD`.
- `gradient(args, sums, ds, of_tile)`: the new sums.
- `store(args, ds_s, step, batch, first_k)`: stores the gradients of a tile's scores, where these are the gradients of a
  tensor.
- `gradient_later(args, sums, half_ds, of_tile, step, place, no_sums)`: the new sums, from gradients of 16 bits, which
  the last product still reads; those in fp32 would have to stay in registers until here. place: `(the item's place
  among sums, query heads of the group)`; no_sums: the result of `start`.
- `finish_head(args, sums, place)`: writes the sums of a query head at `place`, after which they begin anew.
- `finish(args, sums)`: at the end of an item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.triton.changes.kind import WHOLE_NUMBERS, Changes, Functions
from sparseflash.backends.triton.launch.launches import like
from sparseflash.backends.triton.launcher import BoundLaunch, Describe

if TYPE_CHECKING:
    from sparseflash.backends.triton.hopper.learned import HopperCall
    from sparseflash.backends.triton.schedule.plan import Plan
    from sparseflash.scores.change import Scores

# Numbers that the backward's loading warp passes to the warpgroups a step, at least. Fewer would move the buffers of
# plain kernels, which have been measured like this.
_LEAST_TOLD = 5
# An example of memory for sums, whose size the kernels do not depend on.
_SOME_SUMS = torch.empty(16, dtype=torch.float32, device="meta")


class Units(NamedTuple):
    """The units of scores in a kernel, see `hopper/scores.py`."""

    qk_scale: float  # scores times this are exponents of 2
    inverse_unit: float  # what is added to scores is multiplied by this
    cap_scale: float  # and products of queries and keys by this, if they are not in units already


class HopperRequest(NamedTuple):
    """What score modifications are prepared for."""

    dtype: torch.dtype
    k_len: int
    device: torch.device
    units: Units
    rows: int  # queries and keys that the kernel loads at a time
    keys: int
    backward: bool


class Given(NamedTuple):
    """Tensors of a call: those for a kernel's device functions, and the one of its descriptor."""

    tensors: tuple[Tensor, ...] = ()
    described: Tensor | None = None


class HopperKind:
    """One score modification, prepared for one of the kernels and tensors of one layout."""

    # Facts of all of a kind. Whether the kernels compute gradients for its tensors; whether it is added to scores, and
    # so divided by their unit; whether it takes so few registers, and no shared memory, that it runs at all head dims.
    learns = False
    is_added = False
    at_all_dims = False
    # Whether the kernels have been tried with it beside others than a sink; `support.py` knows which others.
    goes_beside = False
    # Names of its tensors as arguments of `combine_rows_kernel`, which completes the rows of chunks.
    merging: tuple[str, ...] = ()

    # Facts of the forward: whether its functions need the number of the tile; whether the branch for masked tiles needs
    # a shuffle, without which ptxas would predicate it; bytes that are loaded with each key.
    reads_blocks = False
    keeps_branch = False
    bytes_of_key = 0
    # How the softmax keeps maxima: times qk_scale; so, but by a coarser scale where they are large; or without the
    # scale. Where all scores of a query are as low as a bias can be, a fused multiplication and subtraction of the
    # maximum would leave an arbitrary number instead of 0.
    maxima: Literal["scaled", "coarse", "unscaled"] = "scaled"

    # Facts of both kernels: whether scores may be NaN past the lengths; what the second result of `of_rows` is for, in
    # the forward not for "rows".
    may_be_nan = False
    adds: Literal["tile", "rows", "threads"] = "tile"
    # Facts of the backward: how many numbers `tell` returns.
    told = 0

    functions: Mapping[str, Any] = {}  # of the kernel it is prepared for; without any, the kernel does not need it
    facts: Mapping[str, Any] = {}  # compile-time constants of its functions, by upper-case names
    numbers: tuple[float, ...] = ()
    whole: tuple[int, ...] = ()
    describe: Describe | None = None  # makes its descriptor
    launches: tuple[BoundLaunch, ...] = ()  # kernels that prepare its tensors at each call
    # What the backward writes for the gradient of the first tensor: the shape of fp32 sums of each item and query head,
    # or a descriptor of gradients.
    sums: tuple[int, ...] | None = None
    describe_learned: Describe | None = None
    # Examples on the meta device.
    examples = Given()
    learned_examples = Given()

    @classmethod
    def unit(cls, change: Any) -> float | None:
        """The unit that scores must have, if any."""
        return None

    def __init__(self, change: Any, request: HopperRequest, wanted: Sequence[bool]) -> None:
        """wanted: which tensors need a gradient, in the backward."""

    def tensors(self, change: Any) -> Given:
        """The tensors of a call that the kernel reads."""
        return Given()

    def bind(self, plan: Plan, block: tuple[int, int]) -> Any:
        """The argument `bound` of `memory`, from the plan of a mask in blocks of `block`."""
        return None

    def launches_of(self, bound: Any) -> list[BoundLaunch]:
        """Kernels that `memory` launches."""
        return []

    def memory(self, change: Any, call: HopperCall, bound: Any) -> Given:
        """Memory for the gradients of one call."""
        return Given() if self.sums is None else Given((call.zeros(self.sums),))

    def gradient(self, change: Any, call: HopperCall, written: Given) -> Tensor | None:
        """The gradient of the first tensor. written: the result of `memory`."""
        return None


class HopperChanges(Changes):
    """All score modifications of a kernel, and what they are together."""

    def __init__(self, kinds: Sequence[HopperKind]) -> None:
        told = sum(each.told for each in kinds)
        super().__init__(
            [
                Functions(each.functions, {**each.facts, "ADDS": each.adds, "TOLD": each.told}, len(each.whole))
                for each in kinds
            ]
        )
        self.HAVE_DESCRIPTORS = tuple(each.describe is not None for each in kinds)
        self.READS_BLOCKS = any(each.reads_blocks for each in kinds)
        self.KEEPS_BRANCH = any(each.keeps_branch for each in kinds)
        self.MAY_BE_NAN = any(each.may_be_nan for each in kinds)
        self.BY_THREAD = any(each.adds == "threads" for each in kinds)
        self.LEAVES_TO_ROWS = any("of_rows" in each.functions for each in kinds)
        self.BYTES_OF_KEY = sum(each.bytes_of_key for each in kinds)
        maxima = {each.maxima for each in kinds}
        self.MAY_BE_COARSE = "coarse" in maxima
        self.KEEPS_UNITS = "unscaled" in maxima or (self.MAY_BE_COARSE and self.BY_THREAD)
        # Of the backward. Number 0 of a step is the tile's, the last the query head's in its group.
        self.ARE_LEARNED = tuple(each.sums is not None for each in kinds)
        self.HAVE_SUMS = any(self.ARE_LEARNED)
        self.HAVE_SUMS_OF_HEADS = any("finish_head" in each.functions for each in kinds)
        self.HAVE_DERIVATIVES = any("derivative" in each.functions for each in kinds)
        self.STORES_GRADIENTS = any("store" in each.functions for each in kinds)
        self.TOLD = max(_LEAST_TOLD, 1 + told + int(self.HAVE_SUMS_OF_HEADS))
        self.FIRST_TOLD = tuple(1 + sum(each.told for each in kinds[:number]) for number in range(len(kinds)))
        facts = {name: x for name, x in self.__dict__.items() if name.isupper()}
        self.cache_key = f"{self.cache_key} {sorted(facts.items())}"


class HopperChanged:
    """The score modifications of one layout, as a Hopper kernel takes them."""

    def __init__(self, kinds: Sequence[HopperKind]) -> None:
        self.all = tuple(kinds)
        self.applied = [each for each in kinds if each.functions]
        self.constant = HopperChanges(self.applied)
        self.has_buffers = any("buffers" in each.functions for each in self.applied)
        self.launches = [launch for each in kinds for launch in each.launches]
        self.described: dict[str, Describe] = {}
        for each in self.applied:
            if each.describe is not None:
                self.described["change_desc"] = each.describe
            if each.describe_learned is not None:
                self.described["learned_desc"] = each.describe_learned
        self.examples = self._arguments([each.examples for each in kinds]) | self.memory_arguments(
            [Given((_SOME_SUMS,)) if each.sums is not None else each.learned_examples for each in kinds]
        )
        self.merging = self._merged([each.examples for each in kinds])
        self.numbers: dict[str, Any] = {}
        if self.applied:
            self.numbers["change_numbers"] = tuple(each.numbers for each in self.applied)
            self.numbers |= dict(zip(WHOLE_NUMBERS, [number for each in self.applied for number in each.whole]))

    def tensors(self, changes: Scores) -> dict[str, Any]:
        """The tensors of a call, by the names of arguments: the kernel's, and those of the kernel that merges rows."""
        found = [each.tensors(change) for each, change in zip(self.all, changes.changes)]
        return self._arguments(found) | self._merged(found)

    def _arguments(self, found: Sequence[Given]) -> dict[str, Any]:
        named: dict[str, Any] = {}
        if self.applied:
            named["changes"] = tuple([x.tensors for each, x in zip(self.all, found) if each.functions])
        for x in found:
            if x.described is not None:
                named["change_desc"] = x.described
        return named

    def _merged(self, found: Sequence[Given]) -> dict[str, Any]:
        return {name: tensor for each, x in zip(self.all, found) for name, tensor in zip(each.merging, x.tensors)}

    def memory_arguments(self, found: Sequence[Given]) -> dict[str, Any]:
        """The kernel's arguments for the memory for gradients of all score modifications."""
        named: dict[str, Any] = {}
        if self.constant.HAVE_SUMS:
            named["learned"] = tuple([x.tensors for each, x in zip(self.all, found) if each.functions])
        for x in found:
            if x.described is not None:
                named["learned_desc"] = x.described
        return named


def examples_of(given: Given) -> Given:
    """The same tensors on the meta device."""
    return Given(tuple(map(like, given.tensors)), None if given.described is None else like(given.described))
