"""Records a function of scores, written in PyTorch, as an expression."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from sparseflash.autocast import without_autocast
from sparseflash.blockmask.vectorize import NumbersAsIndices
from sparseflash.scores.expression import PLACES, Expression, Kind
from sparseflash.scores.operators import BITS, FILLED, NARROW, RECORDED, SAME, WRAPPING, Refused, in_kind, of_bits

_NUMBER = "a number that is read from a tensor, as by item(), if or an index, in place of torch.where"
_NO_GRADIENTS = "torch.no_grad() or the like, in place of detach()"
_READS = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__)  # these call no operator
LONGEST_ROW = 256  # numbers of a product of rows; each becomes one operation of the kernels
_REMEDY = "With backend='blockwise' scores.function runs any function that torch.vmap can call."


class Recorded(NamedTuple):
    """A function as an expression."""

    expression: Expression
    output: int
    tensors: tuple[Tensor, ...]  # those given, then those that the function captures


class _Call:
    """A call of an operator: its arguments are earlier calls, tensors from outside, or numbers."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.name, self.args, self.kwargs, self.result = name, args, kwargs, result


def _is_computed(x: Any) -> bool:
    return isinstance(x, _Call) and not x.name.startswith("lift_fresh")


class _Entries(NamedTuple):
    """A tensor some of whose dimensions have an index."""

    tensor: int
    indices: tuple[int | None, ...]


def recorded(
    function: Callable[..., Tensor], given: Sequence[Tensor], device: torch.device, into: Recorded | None = None,
    *, may_capture_learned: bool = False,
) -> Recorded:  # fmt: skip
    """A function of `(score, b, h, q, k, *given)` as an expression; its nodes are added to the nodes of `into`.

    Raises ValueError for everything that kernels do not take.
    """
    # Dynamo cannot trace the recording. A decorator would import Dynamo for every user.
    record = torch.compiler.disable(_recorded) if torch.compiler.is_dynamo_compiling() else _recorded
    return record(function, given, device, into, may_capture_learned)


@torch.inference_mode(False)  # in it operators arrive undecomposed
def _recorded(
    function: Callable[..., Tensor], given: Sequence[Tensor], device: torch.device, into: Recorded | None,
    may_capture_learned: bool,
) -> Recorded:  # fmt: skip
    # Scalars, whose values do not matter, because none is read.
    places = [torch.zeros((), dtype=torch.int64, device=device) for _ in PLACES]
    calls = _Calls([torch.zeros((), device=device), *places, *(x.detach() for x in given)])
    try:
        with torch.no_grad(), without_autocast(device), _Untraced(calls), NumbersAsIndices(), calls:
            result = function(*(each.result for each in calls.inputs))
    except Refused as error:
        raise _refusal(error) from None
    except Exception as error:
        raise ValueError(
            "scores.function must be recorded for the kernels, by one call with placeholder numbers; it "
            f"raised {type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}. {_REMEDY}"
        ) from error
    try:
        return _Recorder(calls, given, device, into, may_capture_learned).run(result)
    except Refused as error:
        raise _refusal(error) from None


def _refusal(error: Refused) -> ValueError:
    remedy = "" if str(error) == _NUMBER else f" {_REMEDY}"
    return ValueError(
        f"scores.function must consist of operations on single numbers for the kernels; got {error}.{remedy}"
    )


class _Untraced(TorchFunctionMode):
    """Refuses operations that do not show among the calls of operators."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            raise Refused(_NO_GRADIENTS)
        if func in _READS and _is_computed(self._calls.of(args[0])):
            raise Refused(_NUMBER)
        if func in (torch.unbind, torch.Tensor.unbind) and not kwargs:  # also called when a tensor is unpacked
            dim = args[1] if len(args) > 1 else 0
            return tuple(args[0].select(dim, at) for at in range(args[0].shape[dim]))
        return func(*args, **(kwargs or {}))


class _Calls(TorchDispatchMode):
    """Notes the calls of operators in a function."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs = [_Call("input", (), {}, x) for x in inputs]
        self.made: list[_Call] = []
        self._of = {id(each.result): each for each in self.inputs}  # a call keeps its result alive

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.").partition(".")[0]
        if func._schema.is_mutable:
            raise Refused(f"{name}, which changes a tensor in place")
        if torch.is_inference_mode_enabled():
            raise Refused(_NO_GRADIENTS)
        call = _Call(name, tree_map(self.of, args), tree_map(self.of, kwargs), func(*args, **kwargs))
        results = [x for x in tree_iter(call.result) if isinstance(x, Tensor)]
        # Numbers of captured tensors, and of tensors made of numbers, are constants, as are numbers read without
        # PyTorch. Other numbers would depend on these inputs. (The shape of an index is checked by itself.)
        is_shape = torch.Tag.dynamic_output_shape in func.tags and name != "index"
        if (is_shape or not results) and any(map(_is_computed, tree_iter((call.args, call.kwargs)))):
            raise Refused(_NUMBER)
        self.made.append(call)
        self._of.update((id(x), call) for x in results)
        return call.result

    def of(self, x: Any) -> Any:
        """The call that returned this tensor; the argument itself if no call did."""
        return self._of.get(id(x), x) if isinstance(x, Tensor) else x

    def needed_for(self, result: Any) -> list[_Call]:
        needed = {id(result)}
        for call in reversed(self.made):
            if id(call) in needed:
                needed.update(id(x) for x in tree_iter((call.args, call.kwargs)))
        return [call for call in self.made if id(call) in needed]


class _Recorder:
    def __init__(
        self, calls: _Calls, given: Sequence[Tensor], device: torch.device, into: Recorded | None,
        may_capture_learned: bool,
    ) -> None:  # fmt: skip
        self._may_capture_learned = may_capture_learned
        self._calls, self._device = calls, device
        self.made = Expression() if into is None else into.expression
        self._tensors = list(given) if into is None else list(into.tensors)
        self._given = len(given)
        self._values: dict[_Call, int | _Entries] = {}

    def run(self, result: Any) -> Recorded:
        inputs = [self.made.score, *self.made.places, *map(self._whole, range(self._given))]
        self._values.update(zip(self._calls.inputs, inputs, strict=True))
        if not isinstance(result, Tensor) or result.ndim > 0:
            got = f"shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise Refused(f"a result that is not one score, a scalar tensor, but {got}")
        last = self._calls.of(result)
        for call in self._calls.needed_for(last):
            self._values[call] = self._of_dtype(self._called(call), call)
        return Recorded(self.made, self.made.as_float(self._number(last)), tuple(self._tensors))

    def _captured(self, x: Tensor) -> int | _Entries:
        if x.requires_grad and not self._may_capture_learned:
            raise Refused(
                "a captured tensor that requires gradients, which the function must take as a further argument, "
                "passed as scores.function(function, x)"
            )
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
        found = [each for each in entries.indices if each is not None]
        if len(found) < len(entries.indices):
            return entries
        x = self._tensors[entries.tensor]
        kind: Kind = "bool" if x.dtype == torch.bool else "float" if x.is_floating_point() else "int"
        return self.made.load(entries.tensor, found, kind)

    def _called(self, call: _Call) -> int | _Entries:
        name = call.name
        if name.startswith("lift_fresh"):
            return self._literal(call.result)
        if name in SAME:
            return self._value(call.args[0])
        if name in ("select", "index", "slice"):
            return self._indexed(name, *call.args)
        if name in FILLED:
            return self.made.number(FILLED[name](call.args))
        if name in ("dot", "vdot"):
            return self._dot(*map(self._value, call.args))
        if name == "_to_copy" and isinstance(self._value(call.args[0]), _Entries) and call.result.is_floating_point():
            return self._value(call.args[0])
        if name not in RECORDED:
            raise Refused(f"{name}, which is none of them")
        named = {key: each for key, each in call.kwargs.items() if key not in ("device", "layout", "pin_memory")}
        try:
            return RECORDED[name](self.made, *self._operands(call), **named)
        except TypeError as error:
            raise Refused(f"{name} with other arguments than tensors and numbers") from error

    def _dot(self, *rows: int | _Entries) -> int:
        entries = [each for each in rows if isinstance(each, _Entries)]
        free = [each.indices.index(None) for each in entries]
        size = self._tensors[entries[0].tensor].shape[free[0]]
        if size > LONGEST_ROW:
            raise Refused(f"dot of rows of {size} numbers, of which the kernels take at most {LONGEST_ROW}")
        total = self.made.number(0.0)
        for place in map(self.made.number, range(size)):
            factors = []
            for each, dim in zip(entries, free):
                found = self._entry(each._replace(indices=(*each.indices[:dim], place, *each.indices[dim + 1 :])))
                assert isinstance(found, int)
                factors.append(found)
            total = self.made.apply("add", total, self.made.apply("mul", *factors))
        return total

    def _of_dtype(self, found: int | _Entries, call: _Call) -> int | _Entries:
        """The node converted to PyTorch's result dtype. Our operation may return another kind, such as bool for a sum
        of bools.
        """
        if isinstance(found, _Entries):
            return found
        dtype = call.result.dtype
        was_float = self.made.nodes[found].kind == "float" and dtype in BITS  # sign and floor are operations on floats
        if was_float or self._widens(call) or (call.name in WRAPPING and dtype in NARROW):
            return of_bits(self.made, found, dtype)
        return in_kind(self.made, found, dtype)

    def _operands(self, call: _Call) -> list[Any]:
        given = call.args if call.name == "pow" else self._wrapped(call.args)
        nodes = list(map(self._number, given))
        if call.name in WRAPPING and self._widens(call):
            return [of_bits(self.made, x, torch.int64) for x in nodes]
        return nodes

    def _wrapped(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments with integers as PyTorch reads them beside a narrow one: beside uint8, -1 is 255."""
        dtypes = [(x.result if isinstance(x, _Call) else x).dtype for x in args if isinstance(x, (_Call, Tensor))]
        dtype = reduce(torch.promote_types, dtypes, torch.bool)
        if dtype not in NARROW:
            return args
        least, count = torch.iinfo(dtype).min, 1 << torch.iinfo(dtype).bits
        return [(x - least) % count + least if type(x) is int else x for x in args]

    def _widens(self, call: _Call) -> bool:
        """Whether the result has 64 bits though no argument has. A plain number counts as having the others' width."""
        if call.result.dtype != torch.int64:
            return False
        for x in call.args:
            if isinstance(x, (_Call, Tensor)) and (x.result if isinstance(x, _Call) else x).dtype == torch.int64:
                node = self._value(x)
                if isinstance(node, _Entries) or self.made.nodes[node].op != "number":
                    return False
        return True

    def _literal(self, x: Tensor) -> int:
        if x.ndim > 0:
            raise Refused(f"a tensor made inside the function, of shape {list(x.shape)}, which must be passed")
        return self.made.number(x.item())

    def _value(self, x: _Call | Tensor) -> int | _Entries:
        return self._values[x] if isinstance(x, _Call) else self._captured(x)

    def _number(self, x: Any) -> Any:
        """A node for a tensor or number; anything else unchanged."""
        if isinstance(x, (bool, int, float)):
            return self.made.number(x)
        if not isinstance(x, (_Call, Tensor)):
            return x
        found = self._value(x)
        if isinstance(found, _Entries):
            raise Refused(
                f"an operation on all of a tensor of shape {list(self._tensors[found.tensor].shape)}, each of whose "
                "dimensions must first be indexed by a number computed from b, h, q and k"
            )
        return found

    def _indexed(self, name: str, x: Any, *arguments: Any) -> int | _Entries:
        entries = self._value(x)
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
        return self._entry(_Entries(entries.tensor, tuple(indices)))
