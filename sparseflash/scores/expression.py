"""Functions of single scores as data: a list of elementwise operations.

`evaluated` runs it in PyTorch; `derivatives` adds nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["bool", "int", "float"]
PLACES = ("b", "h", "q", "k")
_KINDS: tuple[Kind, ...] = ("bool", "int", "float")
# Conversions to integers: they wrap around, or widen a narrow integer to the 64 bits that later operations need.
INTEGERS = {
    "to_int64": torch.int64, "to_int32": torch.int32, "to_int16": torch.int16, "to_int8": torch.int8,
    "to_uint8": torch.uint8,
}  # fmt: skip


class Node(NamedTuple):
    """One operation. `value` is the number of a `number`, and the number of the tensor that a `load` reads."""

    op: str  # "score", one of PLACES, "number", "load", or one of OPERATIONS
    inputs: tuple[int, ...] = ()
    value: float | int | bool = 0
    kind: Kind = "float"


# The PyTorch function of each operation.
OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "floor_divide": torch.floor_divide, "remainder": torch.remainder,
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "floor": torch.floor, "ceil": torch.ceil,
    "pow": lambda x, exponent: torch.pow(x, exponent.item()),  # as for a number, which is another kernel of PyTorch
    "exp": torch.exp, "log": torch.log, "log1p": torch.log1p, "sqrt": torch.sqrt, "erf": torch.erf,
    "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "minimum": torch.minimum, "maximum": torch.maximum, "where": torch.where,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "not": torch.logical_not,
    "to_float": lambda x: x.to(torch.float64),
    "to_int": lambda x: x.to(torch.int64), "to_bool": lambda x: x != 0, "detach": torch.detach,
    **{op: partial(torch.Tensor.to, dtype=dtype) for op, dtype in INTEGERS.items()},
}  # fmt: skip
_TO_INTEGERS = ("to_int", *INTEGERS)
_OF_BOOLS = ("and", "or", "xor", "not", "where", "eq", "ne", "to_float", "to_bool", "detach", *_TO_INTEGERS)
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne", "not", "to_bool")
_FLOATS = ("div", "sign", "exp", "log", "log1p", "sqrt", "erf", "sin", "cos", "tanh", "sigmoid", "floor", "ceil",
           "to_float")  # fmt: skip


class Expression:
    """The nodes of a function of a score, its place and some tensors; equal nodes exist once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._at: dict[tuple[object, ...], int] = {}
        self.score = self._put(Node("score"))
        self.places = tuple(self._put(Node(name, kind="int")) for name in PLACES)

    def number(self, value: float | int | bool) -> int:
        kind: Kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
        return self._put(Node("number", value=value, kind=kind))

    def load(self, tensor: int, indices: Sequence[int], kind: Kind) -> int:
        return self._put(Node("load", tuple(indices), tensor, kind))

    def apply(self, op: str, *inputs: int) -> int:
        if op in _FLOATS and op != "to_float":
            inputs = tuple(map(self.as_float, inputs))
        elif op == "where":
            inputs = inputs[0], *self._alike(inputs[1:])
        elif len(inputs) == 2:
            inputs = tuple(self._alike(inputs))
        first = self.nodes[inputs[-1]]
        kind: Kind = "bool" if op in _COMPARISONS else "float" if op in _FLOATS else first.kind
        if op in _TO_INTEGERS:
            kind = "int"
        if first.kind == "bool" and op not in _OF_BOOLS:
            inputs = tuple(self.apply("to_int", each) for each in inputs)
            kind = "bool" if op in _COMPARISONS else "int"
        if self.nodes[inputs[0]].kind == kind and op == f"to_{kind}":
            return inputs[0]
        if (simple := self._simplified(op, inputs)) is not None:
            return simple
        if all(self.nodes[each].op == "number" for each in inputs):
            return self.number(_folded(op, [self.nodes[each].value for each in inputs], kind))
        return self._put(Node(op, tuple(inputs), kind=kind))

    def as_float(self, node: int) -> int:
        found = self.nodes[node]
        if found.op == "number":
            return self.number(float(found.value))
        return node if found.kind == "float" else self.apply("to_float", node)

    def reads(self, node: int) -> set[int]:
        found, rest = set(), [node]
        while rest:
            each = rest.pop()
            if each not in found:
                found.add(each)
                rest += self.nodes[each].inputs
        return found

    def evaluated(self, outputs: Sequence[int], inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The nodes `outputs`. inputs: score, b, h, q and k, which broadcast."""
        values: dict[int, Any] = dict(enumerate(inputs))
        for number in sorted(set().union(*(self.reads(each) for each in outputs)) - values.keys()):
            node = self.nodes[number]
            read = [values[each] for each in node.inputs]
            if node.op == "number":
                exact = torch.float64 if node.kind == "float" else None
                values[number] = torch.tensor(node.value, dtype=exact, device=inputs[0].device)
            elif node.op == "to_float":
                values[number] = read[0].to(inputs[0].dtype)
            elif node.op == "load":
                values[number] = tensors[int(node.value)][tuple(read)]
            else:
                values[number] = OPERATIONS[node.op](*read)
        return [values[each] for each in outputs]

    def _put(self, node: Node) -> int:
        key = (*node, type(node.value))
        if key not in self._at:
            self.nodes.append(node)
            self._at[key] = len(self.nodes) - 1
        return self._at[key]

    def _alike(self, inputs: Sequence[int]) -> list[int]:
        kind = max((self.nodes[each].kind for each in inputs), key=_KINDS.index)
        if kind == "float":
            return [self.as_float(each) for each in inputs]
        return [each if self.nodes[each].kind == kind else self.apply(f"to_{kind}", each) for each in inputs]

    def _simplified(self, op: str, inputs: Sequence[int]) -> int | None:
        """Products with 1, sums with 0, and powers with the exponents 1 and 0, which derivatives often contain."""
        values = [self.nodes[each].value if self.nodes[each].op == "number" else None for each in inputs]
        if op in _TO_INTEGERS and self.nodes[inputs[0]].op == op:
            return inputs[0]
        if op == "mul" and 1.0 in values:
            return inputs[1 - values.index(1.0)]
        if op == "add" and 0.0 in values:
            return inputs[1 - values.index(0.0)]
        if op == "pow" and values[1] == 1.0:
            return inputs[0]
        if op == "pow" and values[1] == 0.0:
            return self.number(1.0 if self.nodes[inputs[0]].kind == "float" else 1)
        if op == "where" and inputs[1] == inputs[2]:
            return inputs[1]
        return None


def _folded(op: str, values: Sequence[float | int | bool], kind: Kind) -> float | int | bool:
    inputs = [torch.tensor(x, dtype=torch.float64 if type(x) is float else None) for x in values]
    found = OPERATIONS[op](*inputs).item()
    return bool(found) if kind == "bool" else int(found) if kind == "int" else float(found)


def derivatives(made: Expression, output: int, of: Sequence[int]) -> list[int]:
    """Nodes with the derivatives of `output`, of kind float, by the nodes `of`, each taken as independent.

    At a kink the derivative is PyTorch's, but a `minimum` or `maximum` of equal numbers gives its gradient to the
    first.
    """
    gradients: dict[int, int] = {output: made.number(1.0)}
    relevant = set(of)
    for number in sorted(made.reads(output)):
        node = made.nodes[number]
        is_flat = node.kind != "float" or node.op in ("number", "load", "floor", "ceil", "sign", "detach")
        if not is_flat and any(each in relevant for each in node.inputs):
            relevant.add(number)
    for number in range(output, -1, -1):
        node = made.nodes[number]
        if number not in gradients or number not in relevant or node.op in ("score", "load"):
            continue
        for each, gradient in zip(node.inputs, _RULES[node.op](made, gradients[number], number, *node.inputs)):
            if each in relevant and gradient is not None:
                gradients[each] = made.apply("add", gradients[each], gradient) if each in gradients else gradient
    zero = made.number(0.0)
    return [gradients.get(each, zero) if each in relevant else zero for each in of]


def _rule(
    *factors: Callable[[Callable[..., int], Callable[[float], int], int, tuple[int, ...]], int | None],
) -> Callable[..., list[int | None]]:
    """The output's gradient times each factor, a function of the operation and its nodes, for each input."""

    def gradients(made: Expression, gradient: int, output: int, *inputs: int) -> list[int | None]:
        found = [factor(made.apply, made.number, output, inputs) for factor in factors]
        return [None if each is None else made.apply("mul", gradient, each) for each in found]

    return gradients


def _chosen(op: str) -> Callable[..., list[int | None]]:
    def gradients(made: Expression, gradient: int, output: int, x: int, y: int) -> list[int | None]:
        first, zero = made.apply(op, x, y), made.number(0.0)
        return [made.apply("where", first, gradient, zero), made.apply("where", first, zero, gradient)]

    return gradients


def _where(made: Expression, gradient: int, output: int, condition: int, x: int, y: int) -> list[int | None]:
    zero = made.number(0.0)
    return [None, made.apply("where", condition, gradient, zero), made.apply("where", condition, zero, gradient)]


def _power(made: Expression, gradient: int, output: int, x: int, exponent: int) -> list[int | None]:
    number = made.nodes[exponent].value
    slope = made.apply("mul", exponent, made.apply("pow", x, made.number(number - 1.0)))
    return [made.apply("mul", gradient, slope), None]


_RULES: dict[str, Callable[..., list[int | None]]] = {
    "add": _rule(lambda do, n, y, x: n(1.0), lambda do, n, y, x: n(1.0)),
    "sub": _rule(lambda do, n, y, x: n(1.0), lambda do, n, y, x: n(-1.0)),
    "mul": _rule(lambda do, n, y, x: x[1], lambda do, n, y, x: x[0]),
    "div": _rule(
        lambda do, n, y, x: do("div", n(1.0), x[1]), lambda do, n, y, x: do("neg", do("div", y, x[1])),
    ),
    "remainder": _rule(
        lambda do, n, y, x: n(1.0), lambda do, n, y, x: do("neg", do("floor", do("div", x[0], x[1]))),
    ),
    "neg": _rule(lambda do, n, y, x: n(-1.0)),
    "abs": _rule(lambda do, n, y, x: do("sign", x[0])),
    "pow": _power,
    "exp": _rule(lambda do, n, y, x: y),
    "log": _rule(lambda do, n, y, x: do("div", n(1.0), x[0])),
    "log1p": _rule(lambda do, n, y, x: do("div", n(1.0), do("add", x[0], n(1.0)))),
    "sqrt": _rule(lambda do, n, y, x: do("div", n(0.5), y)),
    "erf": _rule(
        lambda do, n, y, x: do("mul", n(2 / math.sqrt(math.pi)), do("exp", do("neg", do("mul", x[0], x[0])))),
    ),
    "sin": _rule(lambda do, n, y, x: do("cos", x[0])),
    "cos": _rule(lambda do, n, y, x: do("neg", do("sin", x[0]))),
    "tanh": _rule(lambda do, n, y, x: do("sub", n(1.0), do("mul", y, y))),
    "sigmoid": _rule(lambda do, n, y, x: do("mul", y, do("sub", n(1.0), y))),
    "minimum": _chosen("le"),
    "maximum": _chosen("ge"),
    "where": _where,
}  # fmt: skip
