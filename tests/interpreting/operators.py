"""Operators and functions of Triton's language, computed by NumPy and called without their wrappers.

An operator computes in Triton's way once for each pair of types, and calls NumPy from then on. What it learned is in
`type._computed`:

    (name, type of a number, number)     of an operator with a number of the kernel
    (name, id of the other type)         of an operator with a tensor; the type is kept too, so that no other has its id
    (whether each place is new, ...)     of x[:, None]
"""

from functools import cache

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.interpreting.value_types import NUMBERS, Handle, block_type, computation_type, dtype, numpy_dtype, tensor

OPERATORS = {
    "__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply, "__and__": np.bitwise_and,
    "__or__": np.bitwise_or, "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater,
    "__ge__": np.greater_equal, "__eq__": np.equal, "__ne__": np.not_equal,
}  # fmt: skip
SWAPPED = {"__radd__": "__add__", "__rsub__": "__sub__", "__rmul__": "__mul__"}
_OF_BOOLEANS = (np.bitwise_and, np.bitwise_or)
MOST_COMPUTED = 128  # kept for a type: literals of kernels are few, scales are not

_semantic, _unwrap = interpreter.interpreter_semantic, tl.core._unwrap_if_constexpr
_binary_op, _generic_reduce = interpreter.InterpreterBuilder.binary_op, interpreter.ReduceOps.generic_reduce

_BOOL = np.dtype(bool)
_LEAVES = {tensor, int, bool, float, str, type(None), Handle, dtype, block_type, tl.pointer_type}
_unwrapped = {}


def compute_by_numpy(monkeypatch):
    monkeypatch.setattr(interpreter.InterpreterBuilder, "binary_op", _operate_on_numbers)
    monkeypatch.setattr(tl.core, "_unwrap_if_constexpr", _unwrap_if_constexpr)
    monkeypatch.setattr(interpreter, "_patch_attr", _set_unwrapped)
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", _reduce_at_once)
    monkeypatch.setattr(TritonSemantic, "arange", cache(TritonSemantic.arange))
    if hasattr(tl.core, "_normalize_cache_policy"):  # from Triton 3.8 on
        monkeypatch.setattr(tl.core, "_normalize_cache_policy", cache(tl.core._normalize_cache_policy))
    # Triton computes whether integers overflow by five operations, for an assertion in debug mode only.
    if not interpreter.InterpreterOptions().debug:
        monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)


# ---------------------------------------------------------------------- calls


def _unwrap_if_constexpr(o):
    if type(o) is tl.constexpr:
        return o.value
    return o if type(o) in _LEAVES else _unwrap(o)


def _set_unwrapped(obj, name, member, builder, scope):
    if (obj, name) not in _unwrapped:
        _unwrapped[obj, name] = _without_wrapper(obj, name, member)
    scope.set_attr(obj, name, _unwrapped[obj, name])


def _without_wrapper(obj, name, member):
    wrapped = getattr(member, "__wrapped__", member)

    def new_member(*args, **kwargs):
        kwargs["_semantic"] = _semantic
        return wrapped(*args, **kwargs)

    if obj is tensor and (name in OPERATORS or name in SWAPPED):
        return _known_operator(name, new_member)
    if obj is tensor and name == "__getitem__":
        return _known_places(new_member)
    return new_member


# ---------------------------------------------------------------------- operators


def _known_operator(name, slow):
    """`slow`, and NumPy once operands of these types, or this number, are known."""

    def operate(self, other):
        if type(other) is tl.constexpr:
            other = other.value
        right = other.handle.data if type(other) is tensor else None
        key = (name, type(other), other) if right is None else (name, id(other.type))
        computed = self.type._computed
        way = computed.get(key)
        if way is None:
            result = slow(self, other)
            if len(computed) == MOST_COMPUTED:
                computed.clear()
            kept = other if right is None else other.type  # otherwise another type may reuse its id
            computed[key] = _by_numpy(name, self, other), result.type, kept
            return result
        compute, result_type, _ = way
        if compute is None:
            return slow(self, other)
        return tensor(Handle(compute(self.handle.data, right), result_type.scalar), result_type)

    return operate


def _by_numpy(name, x, other):
    if x.dtype.is_ptr():
        return _offset(name, x, other)
    if type(other) is tensor:
        return _of_tensors(OPERATORS[name], x.dtype, other.dtype)
    return _with_number(name, x.dtype, other)


def _offset(name, x, other):
    kind = other.dtype if type(other) is tensor else _semantic.to_tensor(other).dtype
    if name != "__add__" or kind.name not in NUMBERS:
        return None
    size = np.uint64(max(1, x.dtype.element_ty.primitive_bitwidth // 8))
    if type(other) is tensor:
        return lambda pointers, offsets: pointers + size * offsets.astype(np.uint64)
    step = size * np.array([other], np.int64).astype(np.uint64)
    return lambda pointers, _: pointers + step


def _of_tensors(operation, own, kind):
    if own is kind and (own.name in NUMBERS or (own.is_int1() and operation in _OF_BOOLEANS)):
        return operation
    if not {own.name, kind.name} <= NUMBERS:
        return None
    common = numpy_dtype(computation_type(_semantic, own, False, kind, False, False))
    return lambda a, b: operation(a.astype(common, copy=False), b.astype(common, copy=False))


def _with_number(name, own, number):
    """0.0 would match -0.0."""
    kind = _semantic.to_tensor(number).dtype
    if not {own.name, kind.name} <= NUMBERS or (type(number) is float and number == 0):
        return None
    if computation_type(_semantic, own, False, kind, True, False) is not own:
        return None
    operation = OPERATORS[SWAPPED.get(name, name)]
    constant = _semantic.scalar_constant(number, dtype=own).handle.data  # `slow` has checked that it fits
    if name in SWAPPED:
        return lambda a, _: operation(constant, a)
    return lambda a, _: operation(a, constant)


def _known_places(slow):
    every = slice(None)

    def take(self, places):
        if type(places) is not tuple or not self.type.is_block():
            return slow(self, places)
        if not all([place is None or place == every for place in places]):
            return slow(self, places)
        computed, key = self.type._computed, tuple([place is None for place in places])
        result_type = computed.get(key)
        if result_type is None:
            result = slow(self, places)
            computed[key] = result.type
            return result
        return tensor(Handle(self.handle.data[places], result_type.scalar), result_type)

    return take


def _operate_on_numbers(self, lhs, rhs, op):
    left, right, element = lhs.data, rhs.data, lhs.dtype.scalar
    if left.dtype is _BOOL or right.dtype is _BOOL or element.is_ptr():
        return _binary_op(self, lhs, rhs, op)
    output = op(left, right)
    expected = numpy_dtype(element)
    if output.itemsize > expected.itemsize:
        output = output.astype(expected)
    return Handle(output, element)


def _reduce_at_once(self, input):
    if self.combine_fn is not tl.standard._xor_combine:
        return _generic_reduce(self, input)
    (x,) = input
    found = np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims)
    return [self.to_tensor(found, x.dtype)]
