"""How PyTorch's operators are recorded: each as nodes of an expression of scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from sparseflash.scores.expression import INTEGERS, OPERATIONS, Expression


class Refused(Exception):
    """Something that cannot be recorded, as a noun phrase."""


def _simple(op: str) -> Callable[..., int]:
    return lambda made, *inputs: made.apply(op, *inputs)


def _sum(sign: str) -> Callable[..., int]:
    def node(made: Expression, x: int, y: int, alpha: float = 1) -> int:
        return made.apply(sign, x, y if alpha == 1 else made.apply("mul", y, made.number(alpha)))

    return node


def _division(made: Expression, x: int, y: int, rounding_mode: str | None = None) -> int:
    if rounding_mode is None:
        return made.apply("div", x, y)
    if rounding_mode == "floor":
        return _floor_division(made, x, y)
    raise Refused(f"div with rounding_mode={rounding_mode!r}")


def _floor_division(made: Expression, x: int, y: int) -> int:
    if "float" in (made.nodes[x].kind, made.nodes[y].kind):  # the rounded quotient may be the next whole number
        whole = made.apply("div", made.apply("sub", x, made.apply("remainder", x, y)), y)
        return made.apply("floor", made.apply("add", whole, made.number(0.5)))
    return made.apply("floor_divide", x, y)


def _clamp(made: Expression, x: int, low: int | None = None, high: int | None = None, **named: Any) -> int:
    bounds = {"min": low, "max": high} | {name: made.number(each) for name, each in named.items() if each is not None}
    x = x if bounds["min"] is None else made.apply("maximum", x, bounds["min"])
    return x if bounds["max"] is None else made.apply("minimum", x, bounds["max"])


def _power(made: Expression, x: int, exponent: int) -> int:
    node = made.nodes[exponent]
    if node.op != "number":
        raise Refused("a power whose exponent is no number")
    if not math.isfinite(node.value):
        raise Refused(f"a power whose exponent is {node.value}, which must be finite")
    return made.apply("pow", x, exponent)


def _cast(made: Expression, x: int, dtype: torch.dtype | None = None, **_: Any) -> int:
    if dtype in (torch.float16, torch.bfloat16):
        raise Refused(f"a conversion to {dtype}: the kernels compute in fp32")
    if dtype is None:
        return x
    return of_bits(made, x, dtype) if dtype in BITS else in_kind(made, x, dtype)


def in_kind(made: Expression, x: int, dtype: torch.dtype) -> int:
    """Entries of half-precision tensors are read as fp32, so all floating dtypes are one kind."""
    return made.apply("to_float" if dtype.is_floating_point else "to_bool" if dtype == torch.bool else "to_int", x)


BITS = {dtype: op for op, dtype in INTEGERS.items()}
NARROW = BITS.keys() - {torch.int64}


def of_bits(made: Expression, x: int, dtype: torch.dtype) -> int:
    """A number as an integer of this dtype."""
    return made.apply(BITS[dtype], x)


def _logical(op: str) -> Callable[..., int]:
    return lambda made, *inputs: made.apply(op, *(made.apply("to_bool", each) for each in inputs))


def _softplus(made: Expression, x: int) -> int:
    least = made.apply("maximum", x, made.number(0.0))
    return made.apply("add", least, made.apply("log1p", made.apply("exp", made.apply("neg", made.apply("abs", x)))))


def _gelu(made: Expression, x: int, approximate: str = "none") -> int:
    if approximate == "tanh":
        cube = made.apply("mul", made.apply("mul", x, x), made.apply("mul", x, made.number(0.044715)))
        inside = made.apply("mul", made.apply("add", x, cube), made.number(math.sqrt(2 / math.pi)))
        curve = made.apply("tanh", inside)
    else:
        curve = made.apply("erf", made.apply("mul", x, made.number(math.sqrt(0.5))))
    return made.apply("mul", made.apply("mul", x, made.number(0.5)), made.apply("add", curve, made.number(1.0)))


# Operations whose results may need more bits than their inputs. PyTorch keeps the dtype, and wraps around.
WRAPPING = ("add", "sub", "rsub", "mul", "neg", "abs", "pow", "square", "floor_divide", "bitwise_not")
# Names of PyTorch's operators that return their input; the value that each operator fills with; how others are
# recorded.
SAME = ("clone", "alias", "contiguous")
FILLED: dict[str, Callable[[Any], Any]] = {
    "full": lambda args: args[1], "scalar_tensor": lambda args: args[0],
    "full_like": lambda args: args[1], "zeros_like": lambda args: 0.0, "ones_like": lambda args: 1.0,
}  # fmt: skip
RECORDED: dict[str, Callable[..., int]] = {
    **{op: _simple(op) for op in OPERATIONS if not op.startswith("to_")},
    "add": _sum("add"), "sub": _sum("sub"), "div": _division, "floor_divide": _floor_division,
    "rsub": lambda made, x, y, alpha=1: _sum("sub")(made, y, x, alpha),
    "clamp": _clamp, "clamp_min": _clamp, "clamp_max": lambda made, x, high: _clamp(made, x, None, high),
    "pow": _power, "_to_copy": _cast, "where": _simple("where"),
    "masked_fill": lambda made, x, mask, value: made.apply("where", mask, value, x),
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    "bitwise_and": _simple("and"), "bitwise_or": _simple("or"), "bitwise_xor": _simple("xor"),
    "bitwise_not": lambda made, x: _bitwise_not(made, x),
    "relu": lambda made, x: made.apply("where", made.apply("gt", x, made.number(0)), x, made.number(0)),
    "silu": lambda made, x: made.apply("mul", x, made.apply("sigmoid", x)),
    "softplus": _softplus, "gelu": _gelu,
    "reciprocal": lambda made, x: made.apply("div", made.number(1.0), x),
    "rsqrt": lambda made, x: made.apply("div", made.number(1.0), made.apply("sqrt", x)),
    "square": lambda made, x: made.apply("mul", x, x),
    "exp2": lambda made, x: power_of_two(made, x),
    "log2": lambda made, x: made.apply("mul", made.apply("log", x), made.number(1.4426950408889634)),
}  # fmt: skip


def power_of_two(made: Expression, x: int) -> int:
    """`2 ** x`."""
    return made.apply("exp", made.apply("mul", x, made.number(0.6931471805599453)))


def _bitwise_not(made: Expression, x: int) -> int:
    if made.nodes[x].kind == "bool":
        return made.apply("not", x)
    return made.apply("sub", made.number(-1), x)
