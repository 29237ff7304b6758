"""Speeds up Triton's interpreter by looking up facts about types that it otherwise derives for every value.

A kernel makes a value for every operation, and the interpreter spends most of its time on the value's type: it unwraps,
checks, formats and wraps the shape, builds a table of NumPy dtypes, and compares the types of two operands in many
steps. Here Triton does so once for each element type and shape, operands of one type are taken as they are, and
functions of the language are called without their wrappers. An operator computes in Triton's way once for each pair of
types, which gives the type of its results, and calls NumPy from then on.
"""

from functools import cache

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

# Elements whose casts equal NumPy's. bf16, which NumPy lacks, and casts to booleans have rules of their own.
_NUMBERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)} | {"fp16", "fp32", "fp64"}
# Operators that equal NumPy's, once the operands are of one type.
_OPERATORS = {
    "__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply, "__and__": np.bitwise_and,
    "__or__": np.bitwise_or, "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater,
    "__ge__": np.greater_equal, "__eq__": np.equal, "__ne__": np.not_equal,
}  # fmt: skip
_SWAPPED = {"__radd__": "__add__", "__rsub__": "__sub__", "__rmul__": "__mul__"}
_OF_BOOLEANS = (np.bitwise_and, np.bitwise_or)


def derive_types_once(monkeypatch):
    """Lets equal types share the results that Triton derives from their element type and shape."""
    block_type, tensor, dtype = tl.core.block_type, tl.core.tensor, tl.core.dtype
    make_block, make_tensor, equal = block_type.__init__, tensor.__init__, dtype.__eq__
    with_element = block_type.with_element_ty
    numpy_dtype, numpy_dtypes = interpreter._get_np_dtype, {}
    binary_op, bool_, handle_of = interpreter.InterpreterBuilder.binary_op, np.dtype(bool), interpreter.TensorHandle
    computation_type, computation_types = TritonSemantic.computation_type_impl, {}
    broadcast, operands, cast = (
        getattr(TritonSemantic, name) for name in ("broadcast_impl_value", "binary_op_type_checking_impl", "cast")
    )
    semantic, unwrap = interpreter.interpreter_semantic, tl.core._unwrap_if_constexpr
    generic_reduce = interpreter.ReduceOps.generic_reduce
    check_handle = interpreter.TensorHandle.__post_init__
    unwrapped = {}  # members of the language, by place
    joined = {}  # the common shape of two shapes
    leaves = {tensor, int, bool, float, str, type(None), interpreter.TensorHandle, dtype, block_type, tl.pointer_type}

    def make_known_block(self, element_ty, shape):
        if type(shape) is tuple and (known := element_ty.__dict__.get("_blocks", {}).get(shape)) is not None:
            self.__dict__.update(known.__dict__)
            return
        if isinstance(shape, tl.tuple):
            shape = shape.values
        sizes = tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
        if type(shape) not in (list, tuple) or any([type(size) is not int for size in sizes]):
            make_block(self, element_ty, shape)  # which raises the error
            return
        known = element_ty.__dict__.setdefault("_blocks", {})  # of this very type, so it lives as long
        if sizes not in known:
            make_block(self, element_ty, shape)
            self._of_tensors, self._numbers, self._computed, self._sizes = [], {}, {}, sizes
            known[sizes] = self
        self.__dict__.update(known[sizes].__dict__)

    def known_with_element(self, element_ty):
        known = element_ty.__dict__.get("_blocks", {}).get(self._sizes)
        return with_element(self, element_ty) if known is None else known

    def make_known_tensor(self, handle, type):
        self.handle = handle
        shared = type.__dict__.get("_of_tensors")
        if not shared:
            make_tensor(self, handle, type)
            if shared is None:
                shared = type._of_tensors = []
                type._computed = {}
            shared += type, self.dtype, self.shape, self.numel
        self.type, self.dtype, self.shape, self.numel = shared  # equal types are one

    def known_numpy_dtype(tt_dtype):
        scalar = tt_dtype.scalar
        if scalar.is_ptr():
            return numpy_dtype(tt_dtype)
        if scalar.name not in numpy_dtypes:
            numpy_dtypes[scalar.name] = numpy_dtype(tt_dtype)
        return numpy_dtypes[scalar.name]

    def known_computation_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod):
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in computation_types:
            computation_types[key] = computation_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return computation_types[key]

    def broadcast_different_shapes(self, lhs, rhs):
        left, right = lhs.type.__dict__.get("_sizes", ()), rhs.type.__dict__.get("_sizes", ())  # () for a scalar
        if left == right:
            return lhs, rhs
        if (left, right) not in joined:
            found = broadcast(self, lhs, rhs)
            joined[left, right] = found[0].type
            return found
        block = joined[left, right]
        return (
            lhs if left == block._sizes else copied(lhs, block),
            rhs if right == block._sizes else copied(rhs, block),
        )

    def copied(x, block):
        """A number of a kernel is an array of one element to NumPy."""
        data = np.empty(block._sizes, x.handle.data.dtype)
        data[...] = x.handle.data
        return tensor(handle_of(data, x.handle.dtype.scalar), block.with_element_ty(x.type.scalar))

    def known_operands(self, lhs, rhs, *allowed, **checked):
        """Two operands of one type are taken as they are; a number becomes the same operand beside each tensor type."""
        left, right = type(lhs) is tensor, type(rhs) is tensor
        if not (left or right) or (lhs if left else rhs).dtype.is_ptr() or checked:
            return operands(self, lhs, rhs, *allowed, **checked)
        if left and right:
            if rhs.dtype.is_ptr() or len(allowed) > 2:  # division promotes numbers below fp32
                return operands(self, lhs, rhs, *allowed)
            if lhs.type is rhs.type:
                return lhs, rhs
            common = known_computation_type(self, lhs.dtype, False, rhs.dtype, False, False)
            return broadcast_different_shapes(
                self, cast_to_another(self, lhs, common), cast_to_another(self, rhs, common)
            )
        x, number = (lhs, rhs) if left else (rhs, lhs)
        if type(number) not in (int, float) or not number or number != number:  # 0.0 equals -0.0
            return operands(self, lhs, rhs, *allowed)
        numbers, key = x.type.__dict__.setdefault("_numbers", {}), (type(number), number, allowed)
        if key not in numbers:
            found = operands(self, lhs, rhs, *allowed)
            if found[not left] is not x:  # it was cast
                return found
            if len(numbers) == 64:  # literals of kernels are few, scales are not
                numbers.clear()
            numbers[key] = found[left]
        return (x, numbers[key]) if left else (numbers[key], x)

    def cast_to_another(self, input, dst_ty, fp_downcast_rounding=None):
        source, target = input.dtype, dst_ty.scalar
        if source is target:
            return input
        if source.name in _NUMBERS and target.name in _NUMBERS and fp_downcast_rounding is None:
            data = input.handle.data.astype(known_numpy_dtype(target))
            return tensor(handle_of(data, target), input.type.with_element_ty(target))
        return cast(self, input, dst_ty, fp_downcast_rounding)

    def operate_on_numbers(self, lhs, rhs, op):
        left, right, element = lhs.data, rhs.data, lhs.dtype.scalar
        if left.dtype is bool_ or right.dtype is bool_ or element.is_ptr():
            return binary_op(self, lhs, rhs, op)
        output = op(left, right)
        expected = known_numpy_dtype(element)
        if output.itemsize > expected.itemsize:
            output = output.astype(expected)
        return handle_of(output, element)

    def known_operator(name, slow):
        """`slow`; if it was called with operands of these types, or with this number, before, NumPy computes it."""

        def operate(self, other):
            if type(other) is tl.constexpr:
                other = other.value
            right = other.handle.data if type(other) is tensor else None
            key = (name, type(other), other) if right is None else (name, id(other.type))
            computed = self.type._computed
            way = computed.get(key)
            if way is None:
                result = slow(self, other)
                if len(computed) == 128:  # literals of kernels are few, scales are not
                    computed.clear()
                kept = other if right is None else other.type  # otherwise another type may reuse its id
                computed[key] = by_numpy(name, self, other), result.type, kept
                return result
            compute, result_type, _ = way
            if compute is None:
                return slow(self, other)
            return tensor(handle_of(compute(self.handle.data, right), result_type.scalar), result_type)

        return operate

    def by_numpy(name, x, other):
        """A function of two arrays (None: a number as the second); None if only Triton can compute it."""
        operation, own = _OPERATORS[_SWAPPED.get(name, name)], x.dtype
        kind = other.dtype if type(other) is tensor else semantic.to_tensor(other).dtype
        if own.is_ptr():
            if name != "__add__" or kind.name not in _NUMBERS:
                return None
            size = np.uint64(max(1, own.element_ty.primitive_bitwidth // 8))
            if type(other) is tensor:
                return lambda pointers, offsets: pointers + size * offsets.astype(np.uint64)
            step = size * np.array([other], np.int64).astype(np.uint64)
            return lambda pointers, _: pointers + step
        if type(other) is tensor:
            if own is kind and (own.name in _NUMBERS or (own.is_int1() and operation in _OF_BOOLEANS)):
                return operation
            if not {own.name, kind.name} <= _NUMBERS:
                return None
            common = known_numpy_dtype(known_computation_type(semantic, own, False, kind, False, False))
            return lambda a, b: operation(a.astype(common, copy=False), b.astype(common, copy=False))
        # 0.0 would match -0.0, which equals it. And a number may be cast to the tensor's type alone.
        if not {own.name, kind.name} <= _NUMBERS or (type(other) is float and other == 0):
            return None
        if known_computation_type(semantic, own, False, kind, True, False) is not own:
            return None
        number = semantic.scalar_constant(other, dtype=own).handle.data  # `slow` has checked that it fits
        if name in _SWAPPED:
            return lambda a, _: operation(number, a)
        return lambda a, _: operation(a, number)

    def known_places(slow):
        """`slow`; where new dimensions of size one, as in x[:, None], were made before, NumPy makes them."""
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
            return tensor(handle_of(self.handle.data[places], result_type.scalar), result_type)

        return take

    def reduce_at_once(self, input):
        """Sorting sums by xor; the interpreter would call a function for each number."""
        if self.combine_fn is not tl.standard._xor_combine:
            return generic_reduce(self, input)
        (x,) = input
        found = np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(found, x.dtype)]

    def make_checked_handle(self, data, dtype, attr=None):
        if "_most_bytes" not in dtype.__dict__:
            dtype._most_bytes = 8 if dtype.is_ptr() else max(1, dtype.primitive_bitwidth // 8)
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > dtype._most_bytes:
            check_handle(self)  # which raises the error

    def unwrap_if_constexpr(o):
        if type(o) is tl.constexpr:
            return o.value
        return o if type(o) in leaves else unwrap(o)

    def set_unwrapped(obj, name, member, builder, scope):
        if (obj, name) not in unwrapped:
            unwrapped[obj, name] = unwrap_member(obj, name, member)
        scope.set_attr(obj, name, unwrapped[obj, name])

    def unwrap_member(obj, name, member):
        wrapped = getattr(member, "__wrapped__", member)  # a method wraps a function that is wrapped itself

        def new_member(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return wrapped(*args, **kwargs)

        if obj is tensor and (name in _OPERATORS or name in _SWAPPED):
            return known_operator(name, new_member)
        if obj is tensor and name == "__getitem__":
            return known_places(new_member)
        return new_member

    monkeypatch.setattr(block_type, "__init__", make_known_block)
    monkeypatch.setattr(block_type, "with_element_ty", known_with_element)
    monkeypatch.setattr(block_type, "to_ir", lambda self, builder: self)  # its elements are NumPy's already
    monkeypatch.setattr(tensor, "__init__", make_known_tensor)
    monkeypatch.setattr(dtype, "__eq__", lambda self, other: self is other or equal(self, other))
    monkeypatch.setattr(interpreter, "_get_np_dtype", known_numpy_dtype)
    monkeypatch.setattr(interpreter.TensorHandle, "__init__", make_checked_handle)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "binary_op", operate_on_numbers)
    monkeypatch.setattr(tl.core, "_unwrap_if_constexpr", unwrap_if_constexpr)
    monkeypatch.setattr(interpreter, "_patch_attr", set_unwrapped)
    monkeypatch.setattr(TritonSemantic, "computation_type_impl", known_computation_type)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_different_shapes)
    monkeypatch.setattr(TritonSemantic, "binary_op_type_checking_impl", known_operands)
    monkeypatch.setattr(TritonSemantic, "cast", cast_to_another)
    monkeypatch.setattr(TritonSemantic, "arange", cache(TritonSemantic.arange))  # no kernel writes to a value
    if hasattr(tl.core, "_normalize_cache_policy"):  # from Triton 3.8 on
        monkeypatch.setattr(tl.core, "_normalize_cache_policy", cache(tl.core._normalize_cache_policy))
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", reduce_at_once)
    # Triton computes whether integers overflow, by five operations for each sum and product of a kernel, for an
    # assertion that it makes in debug mode only.
    if not interpreter.InterpreterOptions().debug:
        monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
