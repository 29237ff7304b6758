"""Generates the Triton source of a user's score modification and its derivatives; `own.py` describes the functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparseflash.limits import COUNT
from sparseflash.scores.expression import INTEGERS, PLACES, Expression, Node, derivatives

# Maximum number of entries per b and h of a learned table. Every program has its own copy of the gradients in memory.
MOST_ENTRIES = 16384
Way = Literal["queries", "keys", "pairs", "table"]

_FORMS = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "neg": "-{}",
    "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}", "eq": "{} == {}", "ne": "{} != {}",
    "and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}", "not": "{} == 0", "to_bool": "{} != 0",
    "detach": "{}", "where": "tl.where({}, {}, {})", "minimum": "tl.minimum({}, {})", "maximum": "tl.maximum({}, {})",
    "tanh": "tanh({}, HARDWARE_TANH)", "floor_divide": "floor_divide({}, {})",
    **{op: f"{op}({{}})" for op in ("sign", "sigmoid", "log1p")},
    **{op: f"tl.{op}({{}})" for op in ("abs", "floor", "ceil", "exp", "log", "sqrt", "erf", "sin", "cos")},
}  # fmt: skip

HEADER = "changed(score, b, h, q, k, pointers, numbers, HARDWARE_TANH: tl.constexpr)"
_PAIRS = "pair_strides, batch, head, first_q, first_k, q_len, k_len, MASKED"


class Load(NamedTuple):
    """One read of a learned tensor: how the kernels write its gradient, and how that becomes a gradient of the
    tensor.
    """

    tensor: int
    way: Way
    axes: tuple[str | int, ...]

    def entries(self, x: Tensor) -> int:
        return math.prod(size for size, axis in zip(x.shape, self.axes) if axis == "entry")

    def gradient(self, sums: Tensor, x: Tensor) -> Tensor:
        """The gradient of `x`. sums: `[B, Hq, ...]`, followed by queries, keys, both or entries."""
        places = ["b", "h", *{"queries": "q", "keys": "k", "pairs": "qk", "table": "e"}[self.way]]
        read = [axis for axis in self.axes if isinstance(axis, str) and axis != "entry"]
        if "entry" in self.axes:
            read.append("e")
        if unread := [at for at, place in enumerate(places) if place not in read]:
            sums = sums.sum(unread)
        left = [place for place in places if place in read]
        sums = sums.permute([left.index(place) for place in read])
        if "entry" in self.axes:
            sums = sums.unflatten(-1, [size for size, axis in zip(x.shape, self.axes) if axis == "entry"])
        order = [axis for axis in self.axes if isinstance(axis, str) and axis != "entry"]
        order += [f"entry {dim}" for dim, axis in enumerate(self.axes) if axis == "entry"]
        wanted = [f"entry {dim}" if axis == "entry" else axis for dim, axis in enumerate(self.axes)]
        sums = sums.permute([order.index(axis) for axis in wanted if isinstance(axis, str)])
        found = torch.zeros(x.shape, dtype=sums.dtype, device=x.device)
        sizes = iter(sums.shape)
        found[tuple(axis if isinstance(axis, int) else slice(0, next(sizes)) for axis in wanted)] = sums
        return found


class Source:
    """Generates the source text of the functions."""

    def __init__(self, made: Expression, tensors: Sequence[Tensor], sizes: dict[str, int]) -> None:
        self._made, self._tensors, self._sizes = made, tensors, sizes
        self.numbers: list[int] = []  # strides and sizes, passed as arguments so that the text does not depend on them
        self._names: dict[tuple[int, str, int], str] = {}
        self._lines: list[str] = []
        # Of each node, found once: a value may be used by many others.
        self._wide: dict[int, bool] = {}
        self._ranges: dict[int, tuple[int, int] | None] = {}
        self._outside: list[str] = []
        self.text = ""

    def written(self, output: int, slope: int | None, wanted: Sequence[int]) -> list[Load]:
        """Returns the reads of the tensors `wanted`, in the order in which kernels write gradients."""
        made = self._made
        reads = [at for at in sorted(made.reads(output)) if made.nodes[at].op == "load"]
        learned = [at for at in reads if made.nodes[at].value in wanted]
        loads = {at: self._load(made.nodes[at]) for at in learned}
        ways = "queries", "keys", "pairs", "table"
        learned.sort(key=lambda at: ways.index(loads[at].way))
        by_score, *by_loads = derivatives(made, output, [made.score, *learned])
        by_score = by_score if slope is None else slope
        needed = set().union(*(made.reads(each) for each in (output, by_score, *by_loads)))
        for number in sorted(needed):
            self._write(number, made.nodes[number])
        more = [self._value(each) for each in by_loads]
        entries = {}
        for at in learned:
            if loads[at].way == "table":
                entries[at] = len(more)
                more.append(f"tl.zeros(score.shape, tl.int32) + {self._entry(made.nodes[at], loads[at])}")
        result = self._value(output)
        if made.score not in made.reads(output):  # only the score surely has the shape of a tile
            result = f"tl.zeros(score.shape, tl.float32) + {result}"
        if self._outside:
            result = f"tl.where({' + '.join(self._outside)} == 0, {result}, float('nan'))"
        self._lines.append(f"return {result}, {self._value(by_score)}, {_tuple(more)}")
        parts = [_function(HEADER, self._lines)]
        for way in ("queries", "keys"):
            own = [number for number, at in enumerate(learned) if loads[at].way == way]
            if own:
                parts.append(_sums(way, own))
        self._write_stores(parts, learned, loads, entries)
        self.text = "\n\n".join(parts)
        return [loads[at] for at in learned]

    def _write_stores(
        self, parts: list[str], learned: Sequence[int], loads: dict[int, Load], entries: dict[int, int]
    ) -> None:
        lines, first = [], None
        for number, at in enumerate(learned):
            if loads[at].way in ("queries", "keys"):
                continue
            if first is None:
                first = number - sum(loads[each].way == "keys" for each in learned)
            part, gradient = f"parts[{first}]", f"product(ds, more[{number}])"
            first += 1
            if loads[at].way == "pairs":
                lines.append(f"store_pair_gradients({gradient}, {part}, {_PAIRS})")
                continue
            x = self._tensors[loads[at].tensor]
            sizes = [self._number(loads[at].tensor, "size", dim) for dim in _entry_dims(loads[at])]
            if loads[at].entries(x) > MOST_ENTRIES:
                raise ValueError(
                    "a tensor of scores.function that is learned must be indexed by b, h, q and k, or have at most "
                    f"{MOST_ENTRIES:,} entries for each b and h; tensor {loads[at].tensor} has "
                    f"{loads[at].entries(x):,}. Use backend='blockwise'; over several GPUs, where q and k are read "
                    "from tensors of positions, pass numbers of pairs as scores.bias."
                )
            lines.append(f"entries = {' * '.join(sizes)}")
            lines.append(f"own = {part} + tl.cast(tl.program_id(0), tl.int64) * entries")
            lines.append(f"add_table_gradients({gradient}, own, more[{entries[at]}], entries)")
        if lines:
            parts.append(_function(f"stores(ds, more, parts, numbers, {_PAIRS}: tl.constexpr)", lines))

    def _load(self, node: Node) -> Load:
        tensor = int(node.value)
        axes: list[str | int] = []
        for each in node.inputs:
            index = self._made.nodes[each]
            new = index.op not in axes
            axes.append(
                index.op if index.op in PLACES and new else int(index.value) if index.op == "number" else "entry"
            )
        if "entry" in axes:
            return Load(tensor, "table", tuple(each if each in ("b", "h") else "entry" for each in axes))
        way: Way = "queries" if "k" not in axes else "pairs" if "q" in axes else "keys"
        return Load(tensor, way, tuple(axes))

    def _write(self, number: int, node: Node) -> None:
        if node.op in ("number", "score", *PLACES):
            return
        inputs = [self._value(each) for each in node.inputs]
        if node.op == "load":
            self._write_load(number, node)
            return
        is_long = node.op in ("add", "sub", "mul", "neg", "pow") and self._is_wide(number)
        given = [self._made.nodes[each] for each in node.inputs]
        # Nor does Triton compare an integer of 32 bits with a wider one.
        if (is_long and not _fits(self._range(number))) or any(map(_is_long_number, given)):
            for at in range(node.op == "where", len(given)):  # all but the condition
                if given[at].op != "number" and given[at].kind != "float":
                    inputs[at] = f"tl.cast({inputs[at]}, tl.int64)"
        if node.op == "remainder":
            text = "float_remainder({0}, {1})" if node.kind == "float" else "{0} - floor_divide({0}, {1}) * {1}"
        elif node.op == "pow":
            text = self._power(number, inputs[0], self._made.nodes[node.inputs[1]].value)
        elif node.op == "to_float":
            text = "tl.where({}, 1.0, 0.0)" if self._kind(node) == "bool" else "{}.to(tl.float32)"
        elif node.op == "to_int" or node.op in INTEGERS:
            text = self._to_integer(node)
        else:
            text = _FORMS[node.op]
        self._lines.append(f"x{number} = {text.format(*inputs)}")

    def _is_wide(self, number: int) -> bool:
        """Whether PyTorch computes an integer in 64 bits: if a position or an int64 tensor is involved."""
        if number not in self._wide:
            self._wide[number] = self._find_wide(self._made.nodes[number])
        return self._wide[number]

    def _find_wide(self, node: Node) -> bool:
        if node.kind != "int" or node.op in ("number", "to_int") or node.op in INTEGERS:
            return node.op == "to_int64"
        if node.op == "load":
            return self._tensors[int(node.value)].dtype == torch.int64
        return node.op in PLACES or any(self._is_wide(each) for each in node.inputs)

    def _range(self, number: int) -> tuple[int, int] | None:
        """The smallest and the largest value of an integer; None if unknown."""
        if number not in self._ranges:
            self._ranges[number] = self._find_range(self._made.nodes[number])
        return self._ranges[number]

    def _find_range(self, node: Node) -> tuple[int, int] | None:
        if node.kind != "int":
            return (0, 1) if node.kind == "bool" else None
        if node.op == "number":
            return int(node.value), int(node.value)
        if node.op in PLACES:
            return 0, max(self._sizes[node.op] - 1, 0)
        if node.op == "load":
            limits = torch.iinfo(self._tensors[int(node.value)].dtype)
            return limits.min, limits.max
        if node.op not in _CORNERS and node.op not in INTEGERS:
            return None
        found = [self._range(each) for each in node.inputs[node.op == "where" :]]
        if node.op in INTEGERS:
            limits = torch.iinfo(INTEGERS[node.op])
            return found[0] if _is_within(found[0], limits) else (limits.min, limits.max)
        if any(each is None for each in found) or (node.op in ("floor_divide", "remainder") and found[1][0] < 1):  # type: ignore[index]
            return None
        return _CORNERS[node.op](*found)

    def _to_integer(self, node: Node) -> str:
        """The conversion to an integer; "{}" if the number already is an integer in range. `_write` widens integers to
        64 bits where that is needed.
        """
        (x,) = node.inputs
        kind, dtype = self._kind(node), INTEGERS.get(node.op, torch.int32)
        if kind == "bool":
            return "tl.where({}, 1, 0)"
        if kind == "int" and (_is_within(self._range(x), torch.iinfo(dtype)) or dtype == torch.int64):
            return "{}"
        if dtype in (torch.int64, torch.int32):
            return "{}.to(tl.int64)" if dtype == torch.int64 else "{}.to(tl.int32)"
        return f"{{}}.to(tl.int32).to(tl.{str(dtype).removeprefix('torch.')}).to(tl.int32)"

    def _power(self, number: int, base: str, exponent: float) -> str:
        """A power by repeated squaring, times a root for a fractional exponent: a base that is 0 or negative has the
        same power as in PyTorch.
        """
        times, rest = int(abs(exponent)), abs(exponent) % 1
        factors, square = [], base
        while times:
            if times % 2:
                factors.append(square)
            times //= 2
            if times:
                self._lines.append(f"s{number}_{len(self._lines)} = {square} * {square}")
                square = self._lines[-1].partition(" ")[0]
        if rest:
            factors.append(f"tl.sqrt({base})" if rest == 0.5 else f"tl.exp({rest!r} * tl.log({base}))")
        return " * ".join(factors) if exponent > 0 else f"1.0 / ({' * '.join(factors)})"

    def _kind(self, node: Node) -> str:
        return self._made.nodes[node.inputs[0]].kind

    def _write_load(self, number: int, node: Node) -> None:
        tensor = int(node.value)
        x = self._tensors[tensor]
        address, outside = [f"pointers[{tensor}]"], []
        reach = 0
        for dim, each in enumerate(node.inputs):
            index = self._made.nodes[each]
            if index.op == "number":
                if index.value != 0:
                    address.append(f"{index.value} * {self._number(tensor, 'stride', dim)}")
                    reach += int(index.value) * x.stride(dim)
                continue
            at = self._value(each)
            if index.op in PLACES:
                if x.shape[dim] < self._sizes[index.op]:
                    raise ValueError(
                        f"tensor {tensor} of scores.function must have an entry for each {index.op} that indexes it, "
                        f"{self._sizes[index.op]} in dimension {dim}; its shape is {list(x.shape)}."
                    )
            else:
                size = self._number(tensor, "size", dim)
                self._lines.append(f"i{number}_{dim} = tl.where({at} < 0, {at} + {size}, {at})")
                at = f"i{number}_{dim}"
                outside.append(f"tl.where(({at} < 0) | ({at} >= {size}), 1, 0)")
            if index.op in ("b", "h"):
                at = f"tl.cast({at}, tl.int64)"
            else:
                reach += (x.shape[dim] - 1) * x.stride(dim)
            address.append(f"{at} * {self._number(tensor, 'stride', dim)}")
        if reach >= COUNT:
            raise ValueError(
                f"tensor {tensor} of scores.function must have fewer than 2^31 entries for each b and h; got "
                f"{list(x.shape)} with strides {list(x.stride())}. Use scores.bias or backend='blockwise'."
            )
        mask = ""
        if outside:  # summed, because Triton's interpreter cannot take `&` of a scalar and a tile as a mask
            self._lines.append(f"outside{number} = {' + '.join(outside)}")
            self._outside.append(f"outside{number}")
            mask = f", mask=outside{number} == 0, other=0"
        read = f"tl.load({' + '.join(address)}{mask})"
        of_int = ".to(tl.int64)" if x.dtype in (torch.int64, torch.uint32, torch.uint64) else ".to(tl.int32)"
        cast = {"float": ".to(tl.float32)", "int": of_int, "bool": " != 0"}[node.kind]
        self._lines.append(f"x{number} = {read}{cast}")

    def _entry(self, node: Node, load: Load) -> str:
        found = "0"
        for dim in _entry_dims(load):
            index, size = node.inputs[dim], self._number(load.tensor, "size", dim)
            at = self._value(index)
            if self._made.nodes[index].op not in (*PLACES, "number"):
                at = f"tl.where({at} < 0, {at} + {size}, {at})"
            found = at if found == "0" else f"({found}) * {size} + {at}"
        return found

    def _number(self, tensor: int, what: str, dim: int) -> str:
        key = tensor, what, dim
        if key not in self._names:
            x = self._tensors[tensor]
            self._names[key] = f"numbers[{len(self.numbers)}]"
            self.numbers.append(x.shape[dim] if what == "size" else x.stride(dim))
        return self._names[key]

    def _value(self, number: int) -> str:
        node = self._made.nodes[number]
        if node.op == "number":
            return repr(node.value) if math.isfinite(node.value) else f"float('{node.value}')"
        return node.op if node.op in ("score", *PLACES) else f"x{number}"


def _by_corners(of: Callable[..., int]) -> Callable[..., tuple[int, int]]:
    def found(*ranges: tuple[int, int]) -> tuple[int, int]:
        values = [of(*corner) for corner in product(*ranges)]
        return min(values), max(values)

    return found


_CORNERS: dict[str, Callable[..., tuple[int, int]]] = {
    "add": _by_corners(operator.add), "sub": _by_corners(operator.sub), "mul": _by_corners(operator.mul),
    "neg": _by_corners(operator.neg), "minimum": _by_corners(min), "maximum": _by_corners(max),
    "floor_divide": _by_corners(operator.floordiv), "remainder": lambda x, y: (0, y[1] - 1),
    "abs": lambda x: (max(x[0], -x[1], 0), max(-x[0], x[1])),
    "pow": lambda x, y: _by_corners(pow)((min(x[0], 0), max(x[1], 0)), y),
    "where": lambda x, y: (min(x[0], y[0]), max(x[1], y[1])), "to_int": lambda x: x, "detach": lambda x: x,
}  # fmt: skip


def _is_long_number(node: Node) -> bool:
    return node.op == "number" and node.kind == "int" and not _fits((int(node.value), int(node.value)))


def _fits(found: tuple[int, int] | None) -> bool:
    """Whether integers in a range fit in 32 bits; False if the range is unknown."""
    return found is not None and found[0] >= -COUNT and found[1] < COUNT


def _is_within(found: tuple[int, int] | None, limits: torch.iinfo) -> bool:
    return found is not None and found[0] >= limits.min and found[1] <= limits.max


def _entry_dims(load: Load) -> list[int]:
    return [dim for dim, each in enumerate(load.axes) if each == "entry"]


def _sums(way: str, own: Sequence[int]) -> str:
    zeros = ["tl.zeros([TOKENS], tl.float32)" for _ in own]
    added = [f"sums[{place}] + tl.sum(product(ds, more[{number}]), 1)" for place, number in enumerate(own)]
    lines = ["if sums is None:", f"    return {_tuple(zeros)}", "else:", f"    return {_tuple(added)}"]
    return _function(f"sums_of_{way}(sums, ds, more, TOKENS: tl.constexpr)", lines)


def _tuple(values: Sequence[str]) -> str:
    return f"({''.join(f'{each}, ' for each in values).strip()})"


def _function(header: str, lines: Sequence[str]) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"@triton.jit\ndef {header}:\n{body}"
