"""Records a function of scores, written in PyTorch, as an expression."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparseflash.scores.expression import PLACES, Expression, Kind
from sparseflash.scores.operators import FILLED, RECORDED, SAME, Refused, in_kind

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

_REMEDY = "With backend='blockwise' scores.function runs any function."


class Recorded(NamedTuple):
    """A function as an expression."""

    expression: Expression
    output: int
    tensors: tuple[Tensor, ...]  # those given, then those that the function captures


class _Entries(NamedTuple):
    """A tensor some of whose dimensions have an index."""

    tensor: int
    indices: tuple[int | None, ...]


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
    except Refused as error:
        raise _refusal(error) from None
    except Exception as error:
        raise ValueError(
            "scores.function must be recorded for the kernels, by calling it on tensors that stand for all scores; it "
            f"raised {type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}. {_REMEDY}"
        ) from error
    recorder = _Recorder(graph, given, device, into, may_capture_learned)
    try:
        return recorder.run(score.shape)
    except Refused as error:
        raise _refusal(error) from None


def _refusal(error: Refused) -> ValueError:
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
            raise Refused("torch.no_grad() or the like, in place of detach()")
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
                    raise Refused(f"a result that is not one score for each that it gets, {list(shape)}, but {got}")
                output = self.made.as_float(self._number(result))
        return Recorded(self.made, output, tuple(self._tensors))

    def _captured(self, x: Tensor) -> int | _Entries:
        if x.requires_grad and not self._may_capture_learned:
            raise Refused("a captured tensor that requires gradients, which must be passed after the function")
        if x.device != self._device:
            raise Refused(f"a captured tensor on {x.device}, which must be on {self._device}")
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
        if name in SAME:
            return self._values[node.args[0]]  # type: ignore[index]
        if name in ("select", "index", "slice"):
            return self._indexed(name, *node.args)
        if name in FILLED:
            fill = FILLED[name](node)
            return self.made.number(fill)
        if name not in RECORDED:
            raise Refused(f"{name}, which is none of them")
        try:
            return RECORDED[name](self.made, *(self._number(each) for each in node.args), **self._named(node))
        except TypeError as error:
            raise Refused(f"{name} with other arguments than tensors and numbers") from error

    def _of_dtype(self, found: int | _Entries, dtype: torch.dtype) -> int | _Entries:
        return found if isinstance(found, _Entries) else in_kind(self.made, found, dtype)

    def _literal(self, node: Any) -> int:
        found = getattr(self._graph, str(node.target))
        if found.ndim > 0:
            raise Refused(f"a tensor made inside the function, of shape {list(found.shape)}, which must be passed")
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
            raise Refused(
                f"an operation on all of a tensor of shape {list(self._tensors[found.tensor].shape)}, each of whose "
                "dimensions must first be indexed by a number computed from b, h, q and k"
            )
        return found

    def _indexed(self, name: str, x: Any, *arguments: Any) -> int | _Entries:
        entries = self._values[x]
        if not isinstance(entries, _Entries):
            raise Refused(f"{name} of a computed tensor")
        free = [at for at, each in enumerate(entries.indices) if each is None]
        indices = list(entries.indices)
        shape = self._tensors[entries.tensor].shape
        if name == "slice":
            dim, start, stop = (*arguments, 0, None, None)[:3]
            if (start or 0) == 0 and (stop is None or stop >= shape[free[dim]]) and len(arguments) < 4:
                return entries
            raise Refused("a slice of a tensor")
        if name == "select":
            dim, index = arguments
            indices[free[dim]] = self.made.number(index if index >= 0 else index + shape[free[dim]])
            return self._entry(_Entries(entries.tensor, tuple(indices)))
        for at, each in zip(free, arguments[0]):
            if each is not None:
                number = self._number(each)
                if self.made.nodes[number].kind != "int":
                    raise Refused("an index that is no integer")
                indices[at] = number
        found = self._entry(_Entries(entries.tensor, tuple(indices)))
        if isinstance(found, _Entries):
            raise Refused(f"an index for only some dimensions of a tensor of shape {list(shape)}")
        return found


def named_operations() -> list[str]:
    """The names of PyTorch's operators that can be recorded.

    >>> "tanh" in named_operations(), "cumsum" in named_operations()
    (True, False)
    """
    return sorted({*RECORDED, *FILLED, *SAME, "index", "select", "lift_fresh"} - {"and", "or", "xor", "not", *PLACES})
