"""Vectorises a function of single numbers (scalar tensors), as FlexAttention vectorises a `mask_mod`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from sparseflash.blockmask.cache import bounded
from sparseflash.blockmask.number import Number

Function = Callable[..., Any]

# PyTorch's error texts when Python needs a single number but receives a tensor of many.
_ONE_NUMBER = (
    "Boolean value of Tensor",
    "cannot be converted to Scalar",
    "only one element tensors can be converted",
    "only integer tensors of a single element can be converted",
    "only 0-dimensional arrays can be converted",
    "only length-1 arrays can be converted",
)
_CHECKED = 16  # how many results of an array call are compared with calls for single numbers


def vectorized(
    function: Function, name: str, arguments: Sequence[Tensor], single: Callable[[Any], Tensor], what: str = "pairs"
) -> Tensor:
    """`function`, which takes scalar tensors, at every element of `arguments`, which broadcast.

    >>> table = torch.tensor([[1, 2], [3, 4]])
    >>> rows, columns = torch.arange(2)[:, None], torch.arange(2)
    >>> vectorized(lambda q, k: table[q][k] + table[q].max(), "f", [rows, columns], lambda answer: answer).tolist()
    [[3, 4], [7, 8]]

    name, what: names of the function and of the elements in errors. single: checks one result and returns it as a
    tensor. The result has size 1 in every dimension in which all arguments have size 1.

    The function is called through `torch.vmap`. A function that vmap cannot call receives the arguments unchanged, and
    must then treat each element by itself: some of its results are compared with calls for single numbers.
    """
    try:
        return _mapped(function, name, arguments, single)
    except _WrongAnswer as error:
        raise error.why from error.why.__cause__
    except Warning:
        raise
    except Exception as error:
        return _of_arrays(function, name, arguments, single, what, error)


class _WrongAnswer(Exception):
    def __init__(self, why: Exception) -> None:
        super().__init__()
        self.why = why


def _mapped(function: Function, name: str, arguments: Sequence[Tensor], single: Callable[[Any], Tensor]) -> Tensor:
    def answered(*numbers: Tensor) -> Tensor:
        found = function(*numbers)
        try:
            answer = single(found)
        except (TypeError, ValueError) as error:
            raise _WrongAnswer(error) from error
        if answer.numel() != 1:
            got = f"{name} must return one answer for single numbers; got shape {list(answer.shape)}."
            raise _WrongAnswer(ValueError(got))
        return answer.reshape(())

    rank = max(x.ndim for x in arguments)
    sizes = torch.broadcast_shapes(*(x.shape for x in arguments))
    shapes = [(1,) * (rank - x.ndim) + tuple(x.shape) for x in arguments]
    call: Function = answered
    dims = [dim for dim in range(rank) if sizes[dim] != 1]
    for dim in reversed(dims):
        call = torch.vmap(call, tuple(0 if shape[dim] != 1 else None for shape in shapes))
    # torch.compile only traces a graph, where no operation is called.
    with _AsSingle(), nullcontext() if torch.compiler.is_compiling() else _WithoutLoops():
        answer: Tensor = call(*(x.squeeze() for x in arguments))
    return answer.view([size if dim in dims else 1 for dim, size in enumerate(sizes)])


class _WithoutLoops(TorchDispatchMode):
    """Refuses to let vmap loop over single numbers, as it does for operations that it has no batching rule for.

    PyTorch has a switch for that, but it applies to all threads. Here vmap's own operations tell: in such a loop it
    calls the operation with entry 0 of a tensor, then with entry 1, and so on.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._selected: dict[int, tuple[Tensor, Any]] = {}  # what was selected just now, and from where
        self._before: Any = None  # an operation without a batching rule, and where its operand was selected from

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.select.int:
            base, dim, index = args
            self._selected[id(answer)] = answer, (base.data_ptr(), base.shape, base.stride(), dim, index)
        elif self._selected:
            found = next((self._selected[id(x)][1] for x in tree_iter(args) if id(x) in self._selected), None)
            self._selected.clear()
            if found is not None and not _has_batching_rule(func.name()):
                *base, index = found
                if self._before == (func, *base, index - 1):
                    raise NotImplementedError(f"PyTorch has no batching rule for {func.name()}")
                self._before = func, *base, index
        return answer


@bounded(maxsize=512)
def _has_batching_rule(operation: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation, "FuncTorchBatched")


def _of_arrays(
    function: Function, name: str, arguments: Sequence[Tensor], single: Callable[[Any], Tensor], what: str,
    refused: Exception,
) -> Tensor:  # fmt: skip
    """The result of one call with whole arrays, for a function that vmap refused."""
    shape = torch.broadcast_shapes(*(x.shape for x in arguments))
    fits = False
    function = partial(_unread, function)
    try:
        found = function(*arguments)
    except Exception as error:
        is_key = isinstance(error, KeyError) and isinstance(error.args[0], Tensor)  # of a dict
        if is_key or any(words in str(error) for words in _ONE_NUMBER):
            raise TypeError(
                f"{name} must answer for many {what} at once. Use &, | and ~ instead of and, or and not, "
                "(0 <= q - k) & (q - k < 64) instead of 0 <= q - k < 64, torch.minimum, torch.maximum and torch.where "
                "instead of min, max and if, functions of torch instead of int, .item() and math, and tensors instead "
                "of lists and dicts that are indexed; got a tensor where Python needs one number "
                f"({'the key of a dict' if is_key else error})."  # the KeyError itself shows all numbers of the tensor
            ) from error
        if isinstance(error, IndexError) and isinstance(refused, IndexError):
            raise
        # If single numbers fail, too, this raises the function's own error.
        function(*(x.flatten()[0] for x in arguments))
    else:
        answer = single(found)
        fits = answer.ndim <= len(shape) and all(n in (1, m) for n, m in zip(answer.shape[::-1], shape[::-1]))
    if fits:
        wanted = answer.expand(shape)
        try:
            fits = all(
                _agree(_of_one(function, [x.expand(shape)[place] for x in arguments], single), wanted[place])
                for place in _some(wanted)
            ) and all(_agree(some, wanted[place]) for place, some in _slices(function, arguments, single, shape))
        except Exception:
            fits = False
    if not fits:
        text = f"{type(refused).__name__}: {str(refused).partition(chr(10))[0].rstrip('.')}"
        raise TypeError(
            f"{name} must be a function of single numbers that torch.vmap can call for many {what} at once, or return "
            f"for arrays what it returns for each of their numbers; vmap raised {text}."
        ) from refused
    return answer.view((1,) * (len(shape) - answer.ndim) + tuple(answer.shape))


def _unread(function: Function, *arguments: Tensor) -> Any:
    """Raises TypeError if the function makes a text of an array, as in `f"{h}"` for a number h."""
    with _WithoutText():
        return function(*arguments)


class _WithoutText(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__format__, torch.Tensor.__repr__) and args[0].ndim > 0:
            raise TypeError("text is made of an array")
        return func(*args, **(kwargs or {}))


def _slices(
    function: Function, arguments: Sequence[Tensor], single: Callable[[Any], Tensor], shape: Sequence[int]
) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """The answers for some numbers of one dimension, with all numbers of the other dimensions, for each dimension.

    They differ from the answer for all numbers if the function computes across an array, such as its maximum.
    """
    arguments = [x.expand(*[1] * (len(shape) - x.ndim), *x.shape) for x in arguments]
    for dim, size in enumerate(shape):
        for at in {*range(0, size, -(-size // _CHECKED)), size - 1} if size > 1 else ():
            place = (*[slice(None)] * dim, slice(at, at + 1))
            some = [x[place] if x.shape[dim] > 1 else x for x in arguments]
            yield place, single(function(*some)).expand([1 if each == dim else n for each, n in enumerate(shape)])


def _of_one(function: Function, numbers: Sequence[Tensor], single: Callable[[Any], Tensor]) -> Tensor:
    """The answer for single numbers, or for arrays of one number, which some functions need (those that use NumPy)."""
    try:
        return single(function(*numbers))
    except Exception:
        return single(function(*(x.view(1) for x in numbers)))


def _some(answer: Tensor) -> list[tuple[int, ...]]:
    """Some indices of a result; for bools, of the true and of the false elements."""
    generator = torch.Generator().manual_seed(0)
    flat = answer.reshape(-1)
    every = torch.ones_like(flat, dtype=torch.bool)
    chosen = []
    for group in (flat, ~flat) if flat.dtype == torch.bool else (every,):
        found = group.nonzero()[:, 0].cpu()
        chosen.append(found[torch.randperm(len(found), generator=generator)[:_CHECKED]])
    return list(zip(*(x.tolist() for x in torch.unravel_index(torch.cat(chosen), answer.shape))))


def _agree(one: Tensor, other: Tensor) -> bool:
    if one.numel() != other.numel():
        return False
    one = one.reshape(other.shape)
    if one.dtype == torch.bool:
        return torch.equal(one, other.bool())
    # Vectorised loops may round differently from operations on single numbers.
    tolerance = 1e-2 if other.dtype.itemsize == 2 else 1e-4
    return torch.allclose(one.double(), other.double(), tolerance, tolerance, equal_nan=True)


class NumbersAsIndices(TorchFunctionMode):
    """Indexes with scalar tensors without reading them as Python numbers, which vmap forbids."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(map(_is_number, index)) and all(_is_simple(each) for each in index):
                return _entries(args[0], index)
        if func in (torch.take, torch.Tensor.take) and not kwargs and _is_number(args[1]):
            return _entries(args[0].flatten(), args[1:])
        if func is torch.isin and not kwargs and len(args) == 2 and all(isinstance(x, Tensor) for x in args):
            return _is_in(*args)
        return func(*args, **(kwargs or {}))


# For an operation on a batched and an unbatched number, vmap promotes to the dtype of the batched one.
_MIXED = {
    getattr(where, name)
    for where in (torch, torch.Tensor)
    for name in ("where", "clamp", "clamp_min", "clamp_max", "clip", "addcmul", "addcdiv")
}


class _AsSingle(NumbersAsIndices):
    """Makes operations that mix dtypes return the dtype of single numbers inside vmap, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MIXED and len(_dtypes(args, kwargs)) > 1:
            dtype = func(*tree_map(_without_contents, args), **tree_map(_without_contents, kwargs)).dtype
            args, kwargs = tree_map(partial(_in_dtype, dtype=dtype), (args, kwargs))
        return super().__torch_function__(func, types, args, kwargs)


def _dtypes(*values: Any) -> set[torch.dtype]:
    return {x.dtype for x in tree_iter(values) if isinstance(x, Tensor)} - {torch.bool}


def _without_contents(x: Any) -> Any:
    return torch.empty((1,) * x.ndim, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _in_dtype(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype != torch.bool else x


def _is_in(number: Tensor, others: Tensor) -> Tensor:
    """`torch.isin`, which vmap cannot call."""
    dtype = torch.promote_types(number.dtype, others.dtype)
    number, ordered = number.to(dtype), others.to(dtype).flatten().sort().values
    if not len(ordered):
        return torch.zeros_like(number, dtype=torch.bool)
    at = torch.searchsorted(ordered, number).clamp(max=len(ordered) - 1)
    return (_entries(ordered, (at,)) if at.ndim == 0 else ordered[at]) == number


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 0 and x.dtype not in (torch.bool, torch.uint8)


def _is_simple(x: Any) -> bool:
    return _is_number(x) or x is None or x is Ellipsis or (isinstance(x, (int, slice)) and not isinstance(x, bool))


def _entries(x: Tensor, index: Sequence[Any]) -> Tensor:
    """`x[index]`, where all tensors in `index` are scalar."""
    taken = sum(each is not None and each is not Ellipsis for each in index)
    if Ellipsis in [each for each in index if not isinstance(each, Tensor)]:
        at = next(place for place, each in enumerate(index) if each is Ellipsis)
        index = (*index[:at], *[slice(None)] * (x.ndim - taken), *index[at + 1 :])
    numbers: list[Tensor | None] = []
    for each in index:
        dim = len(numbers)
        if isinstance(each, Number):
            each = int(each)
        if isinstance(each, Tensor):
            numbers.append(each)
        elif isinstance(each, int):
            x = x.select(dim, each)
        else:
            x = x.unsqueeze(dim) if each is None else x if each == slice(None) else x[(slice(None),) * dim + (each,)]
            numbers.append(None)
    return x if numbers.count(None) == len(numbers) else torch.ops.aten.index(x, numbers)
