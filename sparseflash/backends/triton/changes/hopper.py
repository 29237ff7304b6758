"""The interface between the Hopper kernels and a score modification: its device functions, facts and arguments.

As in `kind.py` for the portable kernels, a kernel takes all score modifications of a call as one compile-time object
and does not depend on their kinds. The file of each kind has a `HopperKind`. One object of it is prepared for the
forward, another for the backward. The first two arguments of every device function are the compile-time constants
CHANGES and NUMBER. A device function gets values from others only by their results, as described here.

In the forward, `args` is `(tensors, numbers, integers, descriptor)`. The loading warp calls

- `buffers(args, BLOCK_N, STAGES, GROUPS)`: allocates shared memory and mbarriers.
- `record(args, record, number, head, q_len, k_len)`: returns an item's record with OF_CHANGE_FIRST and OF_CHANGE_SECOND
  filled in. At most one score modification of a call has this function.
- `load_with_keys(args, buffers, stage, bar, batch, head, first_k)`: starts loads that complete on the mbarrier of the
  keys, which expects BYTES_OF_KEY more bytes for each key.
- `load_last(args, buffers, step, is_item, batch, head, first_q, first_k, GROUPS, BLOCK_N)`: starts loads after the
  loads of keys and values, with mbarriers of its own.

The warpgroups call the following functions. `item` is `(record_s, turn, q_len, k_len - q_len, qk_scale)`, and C is the
number of the warpgroup.

- `no_item()`, `begin_item(args, item, C, BLOCK_N)`: return a tuple of numbers that is kept for an item, as `of_item`;
  `no_item` before the first item.
- `begin_tile(args, of_item, block, item, C, BLOCK_N)`: returns `(of_tile, whether apply_masked must run)`. `of_tile` is
  kept for the tile.
- `multiply(args, buffers, s, stage, Q)`: adds a matrix product to the scores, whose own product may still be running.
  Q: the layout of its first operand.
- `apply(args, buffers, s, of_tile, step, C)`: returns `(new scores, new of_tile)`.
- `apply_masked(args, s, of_tile, block, item, C, BLOCK_N)`: returns new scores, in tiles that are masked by bits.
- `of_rows(args, s, of_tile, item, BLOCK_N)`: returns `(new scores, number)`. The softmax adds the number to the scores:
  one for the tile, or one for each thread of a row if `adds` is "threads".
- `finish_rows(args, maximum, total, head)`: returns `(maximum, total, factor of the accumulator)` at the end of an
  item.

In the backward, rows of scores are keys. `args` is `(tensors, numbers, integers, descriptor, memory for gradients,
descriptor of gradients)`, and `of_tokens` is `(qk_scale, queries, keys minus queries of a sequence)`. The loading warp
calls

- `buffers(args, ROWS, KEYS)`: as in the forward.
- `begin(args, of_tokens)`: called once in each program. The result is the argument `begun` of `send`.
- `send(args, begun, place, of_tokens, ROWS)`: returns `(numbers, kept)` for a step. The loading warp passes the
  numbers, as many as `sent`, to the warpgroups through shared memory, where `record.received` reads them. `place` is
  `(batch, head, number of the head in its group, first query, first key)`.
- `load_last(args, buffers, step, kept)`: starts loads behind the loads of queries and dout, with mbarriers of its own.

The warpgroups call the following functions. `step` is `(number_s, stage, number of the step, of_tokens)`.

- `start(no_scores)`: returns the sums, still zero, that an item keeps for the gradients of tensors. `no_scores` are
  zeros in the layout of scores.
- `begin_tile(args, step, no_scores)`: returns `of_tile`, as in the forward.
- `apply(args, buffers, s, of_tile, step)`: returns new scores.
- `apply_masked(args, s, of_tile)`: returns `(new scores, new of_tile)`, in tiles that are masked.
- `of_rows(args, s, of_tile, qk_scale)`: returns `(new scores, number, new of_tile)`. The kernel adds the number to
  the exponents; see `adds`.
- `derivative(args, p, s, of_tile)`: returns p times the derivative of the modified scores s. If any score modification
  has this function, s does not include -lse, and dead scores are `backward.DEAD`.
- `gradient(args, sums, ds, of_tile)`: returns the new sums.
- `store(args, ds_s, step, batch, first_k)`: stores the gradients of a tile's scores, if they are also the gradients of
  a tensor.
- `gradient_later(args, sums, half_ds, of_tile, step, place, no_sums)`: returns the new sums, from 16-bit gradients. It
  runs while the product for dk still reads these gradients, after dq has left its registers. Gradients in fp32 would
  need registers of their own until then. `place` is `(the item's place among sums, query heads of the group)`, and
  `no_sums` the result of `start`.
- `finish_head(args, sums, place)`: writes the sums of a query head at `place`; the next head begins with `no_sums`.
- `finish(args, sums)`: writes the sums of an item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.triton.changes.kind import WHOLE_NUMBERS, Changes, Functions
from sparseflash.backends.triton.launch.launches import SOME_PARTS, like
from sparseflash.backends.triton.launcher import BoundLaunch, Describe

if TYPE_CHECKING:
    from sparseflash.backends.triton.hopper.learned import HopperCall
    from sparseflash.backends.triton.schedule.plan import Plan
    from sparseflash.scores.change import Scores

# The fewest numbers that the backward's loading warp passes to the warpgroups in a step. With fewer, the buffers of
# plain kernels would move, and plain kernels have been measured with this layout.
_LEAST_SENT = 5


class Units(NamedTuple):
    """The units of scores in a kernel, see `hopper/scores.py`."""

    qk_scale: float  # the factor from scores to exponents of 2
    inverse_unit: float  # the factor of numbers that are added to scores
    cap_scale: float  # the factor of products of queries and keys, if a score modification needs it


class HopperRequest(NamedTuple):
    """The layout and the kernel that score modifications are prepared for."""

    dtype: torch.dtype
    k_len: int
    device: torch.device
    units: Units
    rows: int  # queries that the kernel loads at a time
    keys: int  # keys that it loads at a time
    backward: bool


class Given(NamedTuple):
    """The tensors of a call that a score modification passes to a kernel."""

    tensors: tuple[Tensor, ...] = ()  # arguments of its device functions
    described: Tensor | None = None  # read by its TMA descriptor


class HopperKind:
    """One score modification, prepared for one of the kernels and tensors of one layout."""

    learns = False  # the kernels compute gradients for its tensors
    is_added = False  # it is added to scores, and so divided by their unit
    at_all_dims = False  # it needs no shared memory and few registers, so it runs at all head dims
    # It has been tried beside other kinds than a sink. `support.py` lists the combinations.
    goes_beside = False
    merging: tuple[str, ...] = ()

    reads_blocks = False
    # The branch for masked tiles must stay a branch. A shuffle in it keeps ptxas from turning it into predicates.
    keeps_branch = False
    bytes_of_key = 0  # that are loaded with each key
    # How the softmax keeps maxima: "scaled" by qk_scale; "coarse": large ones are scaled by a power of two instead, see
    # `forward.scale_of_rows`; "unscaled". If all scores of a query are as low as a bias can be, a fused multiplication
    # and subtraction of a scaled maximum would leave an arbitrary number instead of 0.
    maxima: Literal["scaled", "coarse", "unscaled"] = "scaled"

    may_be_nan = False  # scores past the lengths may be NaN
    # What the number from `of_rows` belongs to: the tile, each row (only in the backward), or each thread of a row.
    adds: Literal["tile", "rows", "threads"] = "tile"
    sent = 0  # in the backward, how many numbers `send` returns

    functions: Mapping[str, Any] = {}  # of the kernel that it is prepared for; empty if that kernel ignores it
    facts: Mapping[str, Any] = {}  # compile-time constants of its functions, by upper-case names
    numbers: tuple[float, ...] = ()
    whole: tuple[int, ...] = ()
    describe: Describe | None = None  # makes its descriptor
    launches: tuple[BoundLaunch, ...] = ()  # kernels that prepare its tensors at each call
    # What the backward writes for the gradient of the first tensor: the shape of fp32 sums of each item and query head,
    # or a descriptor of gradients.
    sums: tuple[int, ...] | None = None
    describe_learned: Describe | None = None
    examples = Given()
    learned_examples = Given()

    @classmethod
    def unit(cls, change: Any) -> float | None:
        """The unit that scores must have, if any."""
        return None

    def __init__(self, change: Any, request: HopperRequest, wanted: Sequence[bool]) -> None:
        """wanted: which tensors need a gradient, in the backward."""

    def tensors(self, change: Any) -> Given:
        return Given()

    def bind(self, plan: Plan, block: tuple[int, int]) -> Any:
        return None

    def launches_of(self, bound: Any) -> list[BoundLaunch]:
        return []

    def memory(self, change: Any, call: HopperCall, bound: Any) -> Given:
        return Given() if self.sums is None else Given((call.zeros(self.sums),))

    def gradient(self, change: Any, call: HopperCall, written: Given) -> Tensor | None:
        return None


class HopperChanges(Changes):
    """Facts about all of them have upper-case names, for the kernel to read."""

    def __init__(self, kinds: Sequence[HopperKind]) -> None:
        sent = sum(each.sent for each in kinds)
        super().__init__(
            [
                Functions(each.functions, {**each.facts, "ADDS": each.adds, "SENT": each.sent}, len(each.whole))
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
        # Of the backward. The first number of a step is the tile's, the last is the query head's number in its group.
        self.ARE_LEARNED = tuple(each.sums is not None for each in kinds)
        self.HAVE_SUMS = any(self.ARE_LEARNED)
        self.HAVE_SUMS_OF_HEADS = any("finish_head" in each.functions for each in kinds)
        self.HAVE_DERIVATIVES = any("derivative" in each.functions for each in kinds)
        self.STORES_GRADIENTS = any("store" in each.functions for each in kinds)
        self.SENT = max(_LEAST_SENT, 1 + sent + int(self.HAVE_SUMS_OF_HEADS))
        self.FIRST_SENT = tuple(1 + sum(each.sent for each in kinds[:number]) for number in range(len(kinds)))
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
            [Given((SOME_PARTS,)) if each.sums is not None else each.learned_examples for each in kinds]
        )
        self.merging = self._merged([each.examples for each in kinds])
        self.numbers: dict[str, Any] = {}
        if self.applied:
            self.numbers["change_numbers"] = tuple(each.numbers for each in self.applied)
            self.numbers |= dict(zip(WHOLE_NUMBERS, [number for each in self.applied for number in each.whole]))

    def tensors(self, changes: Scores) -> dict[str, Any]:
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
        named: dict[str, Any] = {}
        if self.constant.HAVE_SUMS:
            named["learned"] = tuple([x.tensors for each, x in zip(self.all, found) if each.functions])
        for x in found:
            if x.described is not None:
                named["learned_desc"] = x.described
        return named


def examples_of(given: Given) -> Given:
    return Given(tuple(map(like, given.tensors)), None if given.described is None else like(given.described))
