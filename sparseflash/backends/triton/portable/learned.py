"""How the gradients of the tensors of changes of scores are summed.

Every program writes its part of a gradient to memory of its own; the parts are then summed in a fixed order. So there
are no atomics, and the bits are the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.portable.changed import Changed, strides_of_pairs
from sparseflash.backends.triton.portable.launches import Bound, Numbers
from sparseflash.backends.triton.portable.passes import like
from sparseflash.backends.triton.schedule.tile_places import TilePlaces
from sparseflash.backends.triton.schedule.work_item import ITEM_NUMBER
from sparseflash.scores.change import Scores

# What dq_kernel writes for changes of each kind.
_PARTS = {"distance": "dslopes_ptr", "bias": "dbias_ptr", "tile_bias": "dtiles_ptr", "relative": "dtable_ptr"}


class Learned:
    """The gradients that kernels write for the tensors of changes, for tensors of one layout."""

    def __init__(
        self, changes: Scores, changed: Changed, wanted: Sequence[bool], numbers: Numbers, batch: int,
        block: tuple[int, int] | None,
    ) -> None:  # fmt: skip
        """wanted: which tensors get a gradient. block: of the mask, or None if it has lengths."""
        self.numbers, self.block = numbers, block
        self.wants = {kind: any(each) for kind, each in changes.by_kind(wanted).items()}
        self.of_queries: dict[str, Any] = {}  # examples of further arguments of dq_kernel
        self.numbers_of_queries: dict[str, Any] = {}
        self.of_keys: dict[str, Any] = {}  # of dk_dv_kernel
        self.own = changed.own
        self.wants_own = changes.by_kind(wanted).get("function", [])
        self.loads = [] if self.own is None else self.own.loads
        self.pairs = batch, numbers.heads, numbers.q_len, numbers.k_len
        # Triton functions that the kernels call for them.
        self.functions_of_queries: dict[str, Any] = {}
        self.functions_of_keys: dict[str, Any] = {}
        self.tiles: torch.Size | None = None  # the shape of a bias of live tiles that gets a gradient
        some = torch.empty(16, dtype=torch.float32, device="meta")
        if self.wants.get("distance"):
            self.of_queries["dslopes_ptr"] = some
        if self.wants.get("bias"):
            self.of_queries["dbias_ptr"] = some.to(self._dtype_of_parts(changes.find("bias").values, self.pairs))
        if self.wants.get("tile_bias"):
            values = changes.find("tile_bias").values
            self.tiles = values.shape
            own = batch, numbers.heads, *self.tiles[2:]
            self.of_queries["dtiles_ptr"] = some.to(self._dtype_of_parts(values, own))
            self.of_queries["dtiles_starts_ptr"] = some.to(torch.int64)
        if self.wants.get("relative"):
            table = changes.find("relative")
            self.of_queries |= {"dtable_ptr": some, "buckets_ptr": like(table.buckets)}
            self.numbers_of_queries["table_size"] = table.table.shape[1]
        if self.wants.get("key_bias"):
            self.of_keys["dkey_ptr"] = some
        if self.own is not None:
            by_key = [load.way == "keys" for load in self.loads]
            if not all(by_key):
                self.of_queries["own_parts"] = (some,) * by_key.count(False)
            if any(by_key):
                self.of_keys["own_parts"] = (some,) * by_key.count(True)
            self.functions_of_queries = {"OWN_SUMS": self.own.sums["queries"], "OWN_STORES": self.own.stores}
            self.functions_of_keys = {"OWN_SUMS": self.own.sums["keys"]}
        if self.wants.get("bias") or any(load.way == "pairs" for load in self.loads):
            self.numbers_of_queries["pair_strides"] = strides_of_pairs(some.new_empty(self.pairs).stride())

    def given_to_queries(self) -> dict[str, Any]:
        """What the KernelLayout of dq_kernel gets for them."""
        return {
            "more": self.of_queries, "more_numbers": self.numbers_of_queries, "functions": self.functions_of_queries,
        }  # fmt: skip

    def given_to_keys(self) -> dict[str, Any]:
        """And that of dk_dv_kernel."""
        return {"more": self.of_keys, "functions": self.functions_of_keys}

    @staticmethod
    def _dtype_of_parts(values: Tensor, parts: Sequence[int]) -> torch.dtype:
        """Of the written gradients of values, of the shape `parts`: that of the values, unless several are summed."""
        return values.dtype if values.shape == tuple(parts) else torch.float32


class Sums:
    """The gradients of the tensors of changes in one call: memory for the parts, then their sums."""

    def __init__(
        self, learned: Learned, changes: Scores, queries: Bound, keys: Bound, places: TilePlaces | None, q: Tensor,
        k: Tensor, *, all_live: bool,
    ) -> None:  # fmt: skip
        """places: where the gradients of a bias of live tiles are written. all_live: whether the kernels write the
        gradients of all pairs of tokens."""
        self._learned, self._changes, self._queries, self._keys = learned, changes, queries, keys
        self._places = places
        self._batch = q.shape[0]
        programs = len(queries.work.work)
        self._parts: dict[str, Tensor] = {}

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=q.device)

        def of_pairs(dtype: torch.dtype) -> Tensor:
            # Those of dead tiles are 0. Zeros took 0.6 of 3.9 ms of a forward and a backward (8,192 tokens, H200).
            return (torch.empty if all_live else torch.zeros)(learned.pairs, dtype=dtype, device=q.device)

        if "dslopes_ptr" in learned.of_queries:
            self._parts["distance"] = empty(programs, queries.tile)
        if "dbias_ptr" in learned.of_queries:
            self._parts["bias"] = of_pairs(learned.of_queries["dbias_ptr"].dtype)
        if places is not None and learned.tiles is not None:
            dtype = learned.of_queries["dtiles_ptr"].dtype
            self._parts["tile_bias"] = torch.zeros(places.copies, *learned.tiles, dtype=dtype, device=q.device)
        if "dtable_ptr" in learned.of_queries:
            self._parts["relative"] = empty(programs, learned.numbers_of_queries["table_size"]).zero_()
        if "dkey_ptr" in learned.of_keys:
            self._parts["key_bias"] = empty(len(keys.work.work), learned.numbers.heads // k.shape[1], keys.tile)
        self._own: list[Tensor] = []  # by the loads of one's own function
        for load in learned.loads:
            if load.way == "queries":
                self._own.append(empty(programs, queries.tile))
            elif load.way == "keys":
                self._own.append(empty(len(keys.work.work), learned.numbers.heads // k.shape[1], keys.tile))
            elif load.way == "pairs":
                self._own.append(of_pairs(torch.float32))
            else:
                tensor = changes.find("function").given[load.tensor]
                self._own.append(empty(programs, load.entries(tensor)).zero_())

    def of_queries(self) -> dict[str, Any]:
        """Further arguments of dq_kernel."""
        found: dict[str, Any] = {name: self._parts[kind] for kind, name in _PARTS.items() if kind in self._parts}
        if self._places is not None:
            self._places.ready.wait()
            found["dtiles_starts_ptr"] = self._places.starts
        if "relative" in self._parts:
            found["buckets_ptr"] = aligned_start(self._changes.find("relative").buckets.contiguous())
        own = [part for load, part in zip(self._learned.loads, self._own) if load.way != "keys"]
        return {**found, "own_parts": tuple(own)} if own else found

    def of_keys(self) -> dict[str, Any]:
        """Further arguments of dk_dv_kernel."""
        found: dict[str, Any] = {"dkey_ptr": self._parts["key_bias"]} if "key_bias" in self._parts else {}
        own = [part for load, part in zip(self._learned.loads, self._own) if load.way == "keys"]
        return {**found, "own_parts": tuple(own)} if own else found

    def gradients(self, lse: Tensor, drow: Tensor) -> list[Tensor | None]:
        """The gradient of each tensor. drow: of the score of a key without a value, divided by its weight."""
        summed = {
            "distance": self._distance, "relative": self._sums_by_head, "bias": self._bias,
            "tile_bias": self._tile_bias, "key_bias": self._key_bias,
        }  # fmt: skip
        of_kind = {kind: summed[kind](part) for kind, part in self._parts.items()}
        if self._learned.wants.get("sink"):
            of_kind["sink"] = sink_gradient(self._changes.find("sink").logits, lse, drow)
        return in_order(self._changes, of_kind, self._function)

    def _distance(self, part: Tensor) -> Tensor:
        return self._sums_by_head(part.sum(1, keepdim=True)).squeeze(1)

    def _bias(self, part: Tensor) -> Tensor:
        return over_shared(part, self._changes.find("bias").values)

    def _tile_bias(self, part: Tensor) -> Tensor:
        return part[0] if len(part) == 1 else part.sum(0)

    def _key_bias(self, part: Tensor) -> Tensor:
        return over_shared(self._sums_by_key(part), self._changes.find("key_bias").values)

    def _sums_by_head(self, part: Tensor) -> Tensor:
        """The sums of the parts of all programs of each head, `[Hq, ...]`."""
        tiles, heads = self._tiles(self._queries), self._learned.numbers.heads
        head = _items(self._queries) // tiles % heads
        return sums_of_groups(part, head, heads, _unless_cut(self._queries, self._batch * tiles))

    def _sums_by_batch_and_head(self, part: Tensor) -> Tensor:
        """The sums of the parts of all programs of each batch element and head, `[B, Hq, ...]`."""
        tiles, heads = self._tiles(self._queries), self._learned.numbers.heads
        number = _items(self._queries) // tiles
        sums = sums_of_groups(part, number, self._batch * heads, _unless_cut(self._queries, tiles))
        return sums.view(self._batch, heads, *part.shape[1:])

    def _sums_by_query(self, part: Tensor) -> Tensor:
        """The sums of the parts of all programs of each head and query, `[B, Hq, Nq]`."""
        numbers = self._learned.numbers
        count = self._batch * numbers.heads * self._tiles(self._queries)
        sums = sums_of_groups(part, _items(self._queries), count, _unless_cut(self._queries, 1))
        return sums.view(self._batch, numbers.heads, -1)[:, :, : numbers.q_len]

    def _sums_by_key(self, part: Tensor) -> Tensor:
        """The sums of the parts of all programs of each query head and key, `[B, Hq, Nk]`."""
        numbers, tiles = self._learned.numbers, self._tiles(self._keys)
        count = self._batch * numbers.kv_heads * tiles
        sums = sums_of_groups(part, _items(self._keys), count, _unless_cut(self._keys, 1))
        by_head = sums.view(self._batch, numbers.kv_heads, tiles, -1, self._keys.tile).transpose(2, 3)
        return by_head.reshape(self._batch, numbers.heads, -1)[:, :, : numbers.k_len]

    def _tiles(self, kernel: Bound) -> int:
        """The tiles of queries or of keys of one head, each of which is a work item unless it is cut."""
        numbers = self._learned.numbers
        return -(-(numbers.k_len if kernel is self._keys else numbers.q_len) // kernel.tile)

    def _function(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the tensors of one's own function, each the sum of those of its reads."""
        found: list[Tensor | None] = [None] * len(tensors)
        for load, part in zip(self._learned.loads, self._own, strict=True):
            sums = {
                "queries": self._sums_by_query, "keys": self._sums_by_key, "pairs": lambda x: x,
                "table": self._sums_by_batch_and_head,
            }[load.way](part)  # fmt: skip
            gradient, before = load.gradient(sums, tensors[load.tensor]), found[load.tensor]
            found[load.tensor] = gradient if before is None else before + gradient
        return [
            torch.zeros(x.shape, device=x.device) if wants and each is None else each
            for x, wants, each in zip(tensors, self._learned.wants_own, found, strict=True)
        ]


def in_order(
    changes: Scores, of_kind: Mapping[str, Tensor | None], of_function: Callable[..., list[Tensor | None]] | None = None
) -> list[Tensor | None]:
    """The gradient of each tensor of the changes; of closed kinds, of which there is one each, only of the first.

    of_function: the gradients of the tensors of one's own function.
    """
    found: list[Tensor | None] = []
    for change in changes.changes:
        tensors = change.tensors()
        if change.kind == "function" and of_function is not None:
            found += of_function(tensors)
        elif tensors:
            found += [of_kind.get(change.kind), *[None] * (len(tensors) - 1)]
    return found


def sink_gradient(logits: Tensor, lse: Tensor, drow: Tensor) -> Tensor:
    """The gradient of the logits of sinks, `[Hq]`. drow: of the score of a key without a value, divided by its weight,
    `[B, Hq, Nq]`.
    """
    # A query without keys has no sink either, whatever its drow, which may be NaN as its dlse.
    empty = lse == -torch.inf
    weights = torch.exp(logits.float()[:, None] - lse.masked_fill(empty, torch.inf))
    return (weights * drow.masked_fill(empty, 0.0)).sum((0, 2))


def _items(kernel: Bound) -> Tensor:
    """The number of the work item of each program, int64 `[W]`."""
    return kernel.work.work[:, 0, ITEM_NUMBER.value].long()


def _unless_cut(kernel: Bound, programs: int) -> int | None:
    """`programs`, of every group, unless items are cut into chunks, which only the device counts."""
    return None if kernel.work.merged is not None else programs


def sums_of_groups(values: Tensor, group: Tensor, count: int, each: int | None, most: int | None = None) -> Tensor:
    """The sums of the rows of `values` in each group, `[count, ...]`, in the order of the rows.

    >>> sums_of_groups(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]), 2, None).tolist()
    [[2.0], [5.0]]

    group: int64, the group of each row. each: how many rows every group has, if they have equally many and the host
    knows. most: that none has more; without either the host waits for the device.
    """
    group, order = torch.sort(group, stable=True)
    values = values[order]
    if each is not None:
        return values.view(count, each, *values.shape[1:]).sum(1)
    begin, end = (
        torch.searchsorted(group, torch.arange(count, device=group.device), right=right) for right in (False, True)
    )
    most = int((end - begin).max()) if most is None else most
    place = torch.arange(len(group), device=group.device) - begin[group]
    rows = torch.full((count, most), len(group), device=group.device)
    rows[group, place] = torch.arange(len(group), device=group.device)
    padded = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
    return padded[rows].sum(1)


def sums_of_runs(values: Tensor, group: Tensor, count: int, most: int) -> Tensor:
    """As `sums_of_groups`, where every group has rows, and none more than `most`, but few more than one.

    >>> sums_of_runs(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]), 2, 2).tolist()
    [[2.0], [5.0]]

    Each row gets its sum with the next ones of its group, with twice as many each time: so it takes no memory for
    groups as long as the longest.
    """
    group, order = torch.sort(group, stable=True)
    values = values[order]
    summed = 1
    while summed < most:
        is_same = (group[summed:] == group[:-summed]).view(-1, *[1] * (values.ndim - 1))
        values[:-summed] += torch.where(is_same, values[summed:], 0.0)
        summed *= 2
    return values[torch.searchsorted(group, torch.arange(count, device=group.device))]


def over_shared(gradient: Tensor, values: Tensor) -> Tensor:
    """The sum over the dimensions that `values` shares."""
    shared = [axis for axis, n in enumerate(values.shape) if n == 1 and gradient.shape[axis] != 1]
    return gradient.sum(shared, keepdim=True) if shared else gradient
