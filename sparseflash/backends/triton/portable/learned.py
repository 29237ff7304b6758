"""How changes of scores reach the kernels, and how the gradients of their tensors are summed.

Every program writes its part of a gradient to memory of its own; the parts are then summed in a fixed order. So there
are no atomics, and the bits are the same every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.availability import INTERPRETED
from sparseflash.backends.triton.portable.launches import Bound, Numbers
from sparseflash.backends.triton.portable.own import Own
from sparseflash.backends.triton.portable.scores import CAPPED, CHANGED, COMPILED, HARDWARE_TANH, LOGARITHMIC
from sparseflash.scores.change import Scores
from sparseflash.scores.relative import Codes

_META, _CPU = torch.device("meta"), torch.device("cpu")


class Changed:
    """The arguments with which kernels take the changes of scores of one kind."""

    def __init__(self, changes: Scores, numbers: Numbers, q: Tensor, wanted: Sequence[bool] = ()) -> None:
        """wanted: which tensors get a gradient."""
        dtype = q.dtype
        keep = dtype == torch.float32  # the maximum that a sink is compared with must be in its units
        cap, decay = changes.find("softcap"), changes.find("distance")
        table, sink = changes.find("relative"), changes.find("sink")
        key_bias, bias = changes.find("key_bias"), changes.find("bias")
        self.flags = 0
        if keep or changes.without("sink").changes:
            self.flags = CHANGED.value
            self.flags |= CAPPED.value if cap is not None else 0
            self.flags |= LOGARITHMIC.value if decay is not None and decay.is_log else 0
            self.flags |= 0 if keep or INTERPRETED else HARDWARE_TANH.value
            self.flags |= 0 if table is None or INTERPRETED else COMPILED.value
        self.kinds = changes.kinds if self.flags else ()  # of what is done to every score
        self.numbers: dict[str, Any] = {}
        self.examples: dict[str, Any] = {}
        if cap is not None:
            self.numbers |= {"cap": cap.cap, "inverse_cap": 1.0 / cap.cap}
        if decay is not None:
            self.examples["slopes_ptr"] = _like(decay.slopes)
        if table is not None:
            codes = len(table.buckets)
            self.numbers["values_stride"] = codes
            self.examples |= {
                "values_ptr": torch.empty(numbers.heads, codes, dtype=dtype, device=_META),
                **{name: _like(x) for name, x in _codes(table).items()},
            }
        for name, found in (("key_bias", key_bias), ("bias", bias)):
            if found is not None:
                values = _readable(found.values)
                self.numbers[f"{name}_strides"] = tuple(
                    0 if n == 1 else stride for n, stride in zip(values.shape, values.stride())
                )
                self.examples[f"{name}_ptr"] = _like(values)
        self.sink = {} if sink is None else {"sink_ptr": _like(sink.logits)}
        self.own, self.function = None, None
        if (function := changes.find("function")) is not None:
            sizes = dict(zip("bhqk", (q.shape[0], numbers.heads, numbers.q_len, numbers.k_len)))
            # Where its tensors are; of q alone something may be asked on the meta device, where nothing is recorded.
            device = next((x.device for x in function.given), q.device if q.device.type != "meta" else _CPU)
            self.own = own = Own(function, sizes, device, wanted_of(changes, wanted)["function"])
            self.function = own.changed
            if tensors := Own.tensors(function, device):
                self.examples["own_ptrs"] = tuple(map(_like, tensors))
                self.numbers["own_numbers"] = own.numbers

    @staticmethod
    def tensors(changes: Scores, dtype: torch.dtype, device: torch.device) -> list[Any]:
        """The tensors that a call passes for `examples`."""
        found: list[Any] = []
        if (decay := changes.find("distance")) is not None:
            found.append(aligned_start(decay.slopes.contiguous()))
        if (table := changes.find("relative")) is not None:
            # In half precision two bytes each: the compiler would pass four through shared memory, one by one.
            values = table.table.to(dtype).index_select(1, table.buckets)
            found += [values, *(aligned_start(x.contiguous()) for x in _codes(table).values())]
        for kind in ("key_bias", "bias"):
            if (bias := changes.find(kind)) is not None:
                found.append(_readable(bias.values))
        if (function := changes.find("function")) is not None:
            if own := Own.tensors(function, device):
                found.append(tuple(map(aligned_start, own)))
        return found

    @staticmethod
    def sinks(changes: Scores) -> list[Tensor]:
        """The tensors that a call passes for `sink`."""
        found = changes.find("sink")
        return [] if found is None else [aligned_start(found.logits.contiguous())]


class Learned:
    """The gradients that kernels write for the tensors of changes, for tensors of one layout."""

    def __init__(self, changes: Scores, changed: Changed, wanted: Sequence[bool], numbers: Numbers) -> None:
        """wanted: which tensors get a gradient."""
        self.numbers = numbers
        self.wants = {kind: any(each) for kind, each in wanted_of(changes, wanted).items()}
        self.of_queries: dict[str, Any] = {}  # examples of further arguments of dq_kernel
        self.of_keys: dict[str, Any] = {}  # of dk_dv_kernel
        self.own = changed.own
        self.wants_own = wanted_of(changes, wanted).get("function", [])
        self.loads = [] if self.own is None else self.own.loads
        # Triton functions that the kernels call for them.
        self.functions_of_queries: dict[str, Any] = {}
        self.functions_of_keys: dict[str, Any] = {}
        self.table_size = 0
        some = torch.empty(16, dtype=torch.float32, device=_META)
        if self.wants.get("distance"):
            self.of_queries["dslopes_ptr"] = some
        if self.wants.get("bias"):
            self.of_queries["dbias_ptr"] = some.to(self._bias_dtype(changes))
        if self.wants.get("relative"):
            table = changes.find("relative")
            self.table_size = table.table.shape[1]
            self.of_queries |= {"dtable_ptr": some, "buckets_ptr": _like(table.buckets)}
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

    def _bias_dtype(self, changes: Scores) -> torch.dtype:
        """Of the written gradient: that of the bias, unless several are summed."""
        values = changes.find("bias").values
        shared = 1 in values.shape
        return torch.float32 if shared else values.dtype


class Sums:
    """The gradients of the tensors of changes in one call: memory for the parts, then their sums."""

    def __init__(self, learned: Learned, changes: Scores, queries: Bound, keys: Bound, q: Tensor, k: Tensor) -> None:
        self._learned, self._changes, self._queries, self._keys = learned, changes, queries, keys
        self._batch = q.shape[0]
        programs = len(queries.work.work)
        self._parts: dict[str, Tensor] = {}

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=q.device)

        if "dslopes_ptr" in learned.of_queries:
            self._parts["distance"] = empty(programs, queries.tile)
        if "dbias_ptr" in learned.of_queries:
            dtype = learned.of_queries["dbias_ptr"].dtype
            shape = *q.shape[:3], k.shape[2]
            self._parts["bias"] = torch.zeros(shape, dtype=dtype, device=q.device)  # of dead tiles, too
        if "dtable_ptr" in learned.of_queries:
            self._parts["relative"] = empty(programs, learned.table_size).zero_()
        if "dkey_ptr" in learned.of_keys:
            self._parts["key_bias"] = empty(len(keys.work.work), learned.numbers.heads // k.shape[1], keys.tile)
        self._own: list[Tensor] = []  # by the loads of one's own function
        for load in learned.loads:
            if load.way == "queries":
                self._own.append(empty(programs, queries.tile))
            elif load.way == "keys":
                self._own.append(empty(len(keys.work.work), learned.numbers.heads // k.shape[1], keys.tile))
            elif load.way == "pairs":
                self._own.append(empty(*q.shape[:3], k.shape[2]).zero_())
            else:
                tensor = changes.find("function").given[load.tensor]
                self._own.append(empty(programs, load.entries(tensor)).zero_())

    def of_queries(self) -> list[Any]:
        """Further arguments of dq_kernel."""
        found: list[Any] = [self._parts[kind] for kind in ("distance", "bias", "relative") if kind in self._parts]
        if "relative" in self._parts:
            found.append(aligned_start(self._changes.find("relative").buckets.contiguous()))
        own = [part for load, part in zip(self._learned.loads, self._own) if load.way != "keys"]
        return [*found, tuple(own)] if own else found

    def of_keys(self) -> list[Any]:
        """Further arguments of dk_dv_kernel."""
        found: list[Any] = [self._parts["key_bias"]] if "key_bias" in self._parts else []
        own = [part for load, part in zip(self._learned.loads, self._own) if load.way == "keys"]
        return [*found, tuple(own)] if own else found

    def gradients(self, lse: Tensor, drow: Tensor) -> list[Tensor | None]:
        """The gradient of each tensor. drow: of the score of a key without a value, divided by its weight."""
        of_kind = {kind: getattr(self, f"_{kind}")(part) for kind, part in self._parts.items()}
        if self._learned.wants.get("sink"):
            of_kind["sink"] = self._sink(lse, drow)
        found: list[Tensor | None] = []
        for change in self._changes.changes:
            tensors = change.tensors()
            if change.kind == "function":
                found += self._function(tensors)
            elif tensors:
                found += [of_kind.get(change.kind), *[None] * (len(tensors) - 1)]
        return found

    def _distance(self, part: Tensor) -> Tensor:
        return self._of_heads(part.sum(1, keepdim=True)).squeeze(1)

    def _relative(self, part: Tensor) -> Tensor:
        return self._of_heads(part)

    def _of_heads(self, part: Tensor) -> Tensor:
        """The sums of the parts of all programs of each head."""
        numbers, work = self._learned.numbers, self._queries.work
        tiles = -(-numbers.q_len // self._queries.tile)
        head = work.work[:, 0, 0].long() // tiles % numbers.heads
        return sums_of_groups(part, head, numbers.heads, None if work.merged is not None else self._batch * tiles)

    def _bias(self, part: Tensor) -> Tensor:
        values = self._changes.find("bias").values
        return _over_shared(part, values)

    def _key_bias(self, part: Tensor) -> Tensor:
        return _over_shared(self._of_keys(part), self._changes.find("key_bias").values)

    def _of_keys(self, part: Tensor) -> Tensor:
        """The sums of the parts of all programs of each head and key, `[B, Hq, Nk]`."""
        numbers, work = self._learned.numbers, self._keys.work
        tiles = -(-numbers.k_len // self._keys.tile)
        items = self._batch * numbers.kv_heads * tiles
        sums = sums_of_groups(part, work.work[:, 0, 0].long(), items, None if work.merged is not None else 1)
        by_head = sums.view(self._batch, numbers.kv_heads, tiles, -1, self._keys.tile).transpose(2, 3)
        return by_head.reshape(self._batch, numbers.heads, -1)[:, :, : numbers.k_len]

    def _of_queries(self, part: Tensor) -> Tensor:
        """The sums of the parts of all programs of each head and query, `[B, Hq, Nq]`."""
        numbers, work = self._learned.numbers, self._queries.work
        items = self._batch * numbers.heads * -(-numbers.q_len // self._queries.tile)
        sums = sums_of_groups(part, work.work[:, 0, 0].long(), items, None if work.merged is not None else 1)
        return sums.view(self._batch, numbers.heads, -1)[:, :, : numbers.q_len]

    def _of_batch_and_heads(self, part: Tensor) -> Tensor:
        """The sums of the parts of all programs of each batch element and head, `[B, Hq, ...]`."""
        numbers, work = self._learned.numbers, self._queries.work
        tiles = -(-numbers.q_len // self._queries.tile)
        number, count = work.work[:, 0, 0].long() // tiles, self._batch * numbers.heads
        sums = sums_of_groups(part, number, count, None if work.merged is not None else tiles)
        return sums.view(self._batch, numbers.heads, *part.shape[1:])

    def _function(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the tensors of one's own function, each the sum of those of its reads."""
        found: list[Tensor | None] = [None] * len(tensors)
        for load, part in zip(self._learned.loads, self._own, strict=True):
            sums = {
                "queries": self._of_queries, "keys": self._of_keys, "pairs": lambda x: x,
                "table": self._of_batch_and_heads,
            }[load.way](part)  # fmt: skip
            gradient, before = load.gradient(sums, tensors[load.tensor]), found[load.tensor]
            found[load.tensor] = gradient if before is None else before + gradient
        return [
            torch.zeros(x.shape, device=x.device) if wants and each is None else each
            for x, wants, each in zip(tensors, self._learned.wants_own, found, strict=True)
        ]

    def _sink(self, lse: Tensor, drow: Tensor) -> Tensor:
        logits = self._changes.find("sink").logits.float()
        weights = torch.exp(logits[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
        return (weights * drow).sum((0, 2))


def wanted_of(changes: Scores, wanted: Sequence[bool]) -> dict[str, list[bool]]:
    """Which tensors of each kind of change get a gradient; of closed kinds only the first tensor is learned."""
    left = iter(wanted)
    return {change.kind: [next(left, False) for _ in change.tensors()] for change in changes.changes}


def sums_of_groups(values: Tensor, group: Tensor, count: int, each: int | None) -> Tensor:
    """The sums of the rows of `values` in each group, `[count, ...]`, in the order of the rows.

    >>> sums_of_groups(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]), 2, None).tolist()
    [[2.0], [5.0]]

    group: int64, the group of each row. each: how many rows every group has, if they have equally many and the host
    knows.
    """
    order = torch.sort(group, stable=True).indices
    if each is not None:
        return values[order].view(count, each, *values.shape[1:]).sum(1)
    sizes = torch.bincount(group, minlength=count)
    most = int(sizes.max())
    place = torch.arange(len(group), device=group.device) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    rows = torch.full((count, most), len(group), device=group.device)
    rows[group[order], place] = order
    padded = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
    return padded[rows].sum(1)


def _over_shared(gradient: Tensor, values: Tensor) -> Tensor:
    """The sum over the dimensions that `values` shares."""
    shared = [axis for axis, n in enumerate(values.shape) if n == 1 and gradient.shape[axis] != 1]
    return gradient.sum(shared, keepdim=True) if shared else gradient


def _codes(table: Codes) -> dict[str, Tensor]:
    """What the kernels read to find the entries of scores."""
    if table.until.numel():
        return {"until_ptr": table.until}
    return {"q_codes_ptr": table.q_codes, "k_codes_ptr": table.k_codes}


def _readable(values: Tensor) -> Tensor:
    """The same values, neighbouring keys side by side."""
    if values.stride(-1) != 1 and values.shape[-1] != 1:
        values = values.contiguous()
    return aligned_start(values)


def _like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_META)
