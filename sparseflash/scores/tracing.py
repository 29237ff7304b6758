"""Records a function of scores, written in PyTorch, as an expression."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparseflash.scores.expression import OPERATIONS, PLACES, Expression, Kind

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

_REMEDY = "Use backend='blockwise', which runs any function."


class Recorded(NamedTuple):
    """A function as an expression."""

    expression: Expression
    output: int
    tensors: tuple[Tensor, ...]  # those given, then those that the function captures


class _Entries(NamedTuple):
    """A tensor some of whose dimensions have an index."""

    tensor: int
    indices: tuple[int | None, ...]


class _Refused(Exception):
    """What cannot be recorded, as a noun phrase."""


def recorded(
    function: Callable[..., Tensor], given: Sequence[Tensor], device: torch.device, into: Recorded | None = None,
    *, may_capture_learned: bool = False,
) -> Recorded:  # fmt: skip
    """A function of `(score, b, h, q, k, *given)` as an expression; its nodes are added to those of `into`.

    Raises ValueError for what `scores.function` says that kernels do not take.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # late: the import takes seconds

    # Five different sizes, so that a result of another shape is noticed. All positions are 0: only shapes matter.
    batch, heads, queries, keys = 2, 3, 5, 7
    shapes = (batch, 1, 1, 1), (heads, 1, 1), (queries, 1), (keys,)
    places = [torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes]
    score = torch.zeros(batch, heads, queries, keys, device=device)
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            graph = make_fx(_watched(function))(score, *places, *(x.detach() for x in given))
    except _Refused as error:
        raise _refusal(error) from None
    except Exception as error:
        raise ValueError(
            "scores.function must be recorded for the kernels, by calling it on tensors that stand for all scores; it "
            f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]} {_REMEDY}"
        ) from error
    recorder = _Recorder(graph, given, device, into, may_capture_learned)
    try:
        return recorder.run(score.shape)
    except _Refused as error:
        raise _refusal(error) from None


def _refusal(error: _Refused) -> ValueError:
    return ValueError(f"scores.function must consist of elementwise operations for the kernels; got {error}. {_REMEDY}")


def _watched(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def watched(*inputs: Tensor) -> Tensor:
        with _GradientsAreLeftOn():
            return function(*inputs)

    return watched


class _GradientsAreLeftOn(TorchFunctionMode):
    """Refuses `torch.no_grad()`, which leaves no trace in what is recorded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            raise _Refused("torch.no_grad() or the like, in place of detach()")
        return func(*args, **(kwargs or {}))


class _Recorder:
    def __init__(
        self, graph: GraphModule, given: Sequence[Tensor], device: torch.device, into: Recorded | None,
        may_capture_learned: bool,
    ) -> None:  # fmt: skip
        self._may_capture_learned = may_capture_learned
        self._graph, self._device = graph, device
        self.made = Expression() if into is None else into.expression
        self._tensors = list(given) if into is None else list(into.tensors)
        self._given = len(given)
        self._values: dict[Node, int | _Entries] = {}

    def run(self, shape: Sequence[int]) -> Recorded:
        inputs = [self.made.score, *self.made.places, *map(self._whole, range(self._given))]
        placeholders = iter(inputs)
        output = 0
        for node in self._graph.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = next(placeholders)
            elif node.op == "get_attr":
                if not all(str(user.target).startswith("aten.lift_fresh") for user in node.users):
                    self._values[node] = self._captured(getattr(self._graph, str(node.target)))
            elif node.op == "call_function":
                # PyTorch's kind, which an operation of numbers may not have: a sum of bools is a bool.
                self._values[node] = self._of_dtype(self._called(node), node.meta["val"].dtype)
            else:
                (result,) = node.args
                if not hasattr(result, "meta") or result.meta["val"].shape != torch.Size(shape):
                    got = list(result.meta["val"].shape) if hasattr(result, "meta") else type(result).__name__
                    raise _Refused(f"a result that is not one score for each that it gets, {list(shape)}, but {got}")
                output = self.made.as_float(self._number(result))
        return Recorded(self.made, output, tuple(self._tensors))

    def _captured(self, x: Tensor) -> int | _Entries:
        if x.requires_grad and not self._may_capture_learned:
            raise _Refused("a captured tensor that requires gradients, which must be passed after the function")
        if x.device != self._device:
            raise _Refused(f"a captured tensor on {x.device}, which must be on {self._device}")
        found = next((number for number, each in enumerate(self._tensors) if each is x), None)
        if found is None:
            self._tensors.append(x)
            found = len(self._tensors) - 1
        return self._whole(found)

    def _whole(self, tensor: int) -> int | _Entries:
        return self._entry(_Entries(tensor, (None,) * self._tensors[tensor].ndim))

    def _entry(self, entries: _Entries) -> int | _Entries:
        """A node, if all dimensions have an index."""
        found = [each for each in entries.indices if each is not None]
        if len(found) < len(entries.indices):
            return entries
        x = self._tensors[entries.tensor]
        kind: Kind = "bool" if x.dtype == torch.bool else "float" if x.is_floating_point() else "int"
        return self.made.load(entries.tensor, found, kind)

    def _called(self, node: Node) -> int | _Entries:
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        if name.startswith("lift_fresh"):  # torch.tensor(...) inside the function
            return self._literal(node.args[0])
        if name in _SAME:
            return self._values[node.args[0]]  # type: ignore[index]
        if name in ("select", "index", "slice"):
            return self._indexed(name, *node.args)
        if name in _FILLED:
            fill = _FILLED[name](node)
            return self.made.number(fill)
        if name not in _RECORDED:
            raise _Refused(f"{name}, which is none of them")
        try:
            return _RECORDED[name](self.made, *(self._number(each) for each in node.args), **self._named(node))
        except TypeError as error:
            raise _Refused(f"{name} with other arguments than tensors and numbers") from error

    def _of_dtype(self, found: int | _Entries, dtype: torch.dtype) -> int | _Entries:
        return found if isinstance(found, _Entries) else _in_kind(self.made, found, dtype)

    def _literal(self, node: Any) -> int:
        found = getattr(self._graph, str(node.target))
        if found.ndim > 0:
            raise _Refused(f"a tensor made inside the function, of shape {list(found.shape)}, which must be passed")
        return self.made.number(found.item())

    def _named(self, node: Node) -> dict[str, Any]:
        return {name: each for name, each in node.kwargs.items() if name not in ("device", "layout", "pin_memory")}

    def _number(self, x: Any) -> Any:
        """A node for an argument; what is no tensor or number stays as it is."""
        if isinstance(x, (bool, int, float)):
            return self.made.number(x)
        if not hasattr(x, "meta"):
            return x
        found = self._values[x]
        if isinstance(found, _Entries):
            raise _Refused(
                f"an operation on all of a tensor of shape {list(self._tensors[found.tensor].shape)}, each of whose "
                "dimensions must first be indexed by a number computed from b, h, q and k"
            )
        return found

    def _indexed(self, name: str, x: Any, *arguments: Any) -> int | _Entries:
        entries = self._values[x]
        if not isinstance(entries, _Entries):
            raise _Refused(f"{name} of a computed tensor")
        free = [at for at, each in enumerate(entries.indices) if each is None]
        indices = list(entries.indices)
        shape = self._tensors[entries.tensor].shape
        if name == "slice":
            dim, start, stop = (*arguments, 0, None, None)[:3]
            if (start or 0) == 0 and (stop is None or stop >= shape[free[dim]]) and len(arguments) < 4:
                return entries
            raise _Refused("a slice of a tensor")
        if name == "select":
            dim, index = arguments
            indices[free[dim]] = self.made.number(index if index >= 0 else index + shape[free[dim]])
            return self._entry(_Entries(entries.tensor, tuple(indices)))
        for at, each in zip(free, arguments[0]):
            if each is not None:
                number = self._number(each)
                if self.made.nodes[number].kind != "int":
                    raise _Refused("an index that is no integer")
                indices[at] = number
        found = self._entry(_Entries(entries.tensor, tuple(indices)))
        if isinstance(found, _Entries):
            raise _Refused(f"an index for only some dimensions of a tensor of shape {list(shape)}")
        return found


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
    raise _Refused(f"div with rounding_mode={rounding_mode!r}")


def _floor_division(made: Expression, x: int, y: int) -> int:
    if "float" in (made.nodes[x].kind, made.nodes[y].kind):
        return made.apply("floor", made.apply("div", x, y))
    return made.apply("floor_divide", x, y)


def _clamp(made: Expression, x: int, low: int | None = None, high: int | None = None, **named: Any) -> int:
    bounds = {"min": low, "max": high} | {name: made.number(each) for name, each in named.items() if each is not None}
    x = x if bounds["min"] is None else made.apply("maximum", x, bounds["min"])
    return x if bounds["max"] is None else made.apply("minimum", x, bounds["max"])


def _power(made: Expression, x: int, exponent: int) -> int:
    node = made.nodes[exponent]
    if node.op != "number":
        raise _Refused("a power whose exponent is no number")
    if not math.isfinite(node.value):
        raise _Refused(f"a power whose exponent is {node.value}, which must be finite")
    return made.apply("pow", x, exponent)


def _cast(made: Expression, x: int, dtype: torch.dtype | None = None, **_: Any) -> int:
    if dtype in (torch.float16, torch.bfloat16):
        raise _Refused(f"a conversion to {dtype}: the kernels compute in fp32")
    return x if dtype is None else _in_kind(made, x, dtype)


def _in_kind(made: Expression, x: int, dtype: torch.dtype) -> int:
    """Entries of half-precision tensors are read as fp32, so all floating dtypes are one kind."""
    return made.apply("to_float" if dtype.is_floating_point else "to_bool" if dtype == torch.bool else "to_int", x)


def _logical(op: str) -> Callable[..., int]:
    return lambda made, *inputs: made.apply(op, *(made.apply("to_bool", each) for each in inputs))


def _softplus(made: Expression, x: int) -> int:
    least = made.apply("maximum", x, made.number(0.0))
    return made.apply("add", least, made.apply("log1p", made.apply("exp", made.apply("neg", made.apply("abs", x)))))


# Names of PyTorch's operators that return what they get; what they fill a tensor with; how others are recorded.
_SAME = ("clone", "alias", "contiguous")
_FILLED: dict[str, Callable[[Any], Any]] = {
    "full": lambda node: node.args[1], "scalar_tensor": lambda node: node.args[0],
    "full_like": lambda node: node.args[1], "zeros_like": lambda node: 0.0, "ones_like": lambda node: 1.0,
}  # fmt: skip
_RECORDED: dict[str, Callable[..., int]] = {
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
    "softplus": _softplus,
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


def named_operations() -> list[str]:
    """The names of PyTorch's operators that can be recorded.

    >>> "tanh" in named_operations(), "cumsum" in named_operations()
    (True, False)
    """
    return sorted(
        {*_RECORDED, *_FILLED, *_SAME, "index", "select", "lift_fresh"} - {"and", "or", "xor", "not", *PLACES}
    )
