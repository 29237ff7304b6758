"""Types of values in Triton's interpreter, each derived once.

The interpreter spends most of its time on the type of each value. Here equal types are one object, compared by `is`,
which keeps:

    element type._blocks    {shape: block type}
    block type._sizes       the shape, as plain numbers; a scalar type has none
    type._of_tensors        the four attributes that every tensor of this type has
    type._numbers           {number of a kernel: the operand that it becomes beside a tensor of this type}
    type._computed          what operators have computed with tensors of this type: see operators.py
"""

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

NUMBERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)} | {"fp16", "fp32", "fp64"}
MOST_NUMBERS = 64  # kept for a type: literals of kernels are few, scales are not

tensor, block_type, dtype, Handle = tl.core.tensor, tl.core.block_type, tl.core.dtype, interpreter.TensorHandle
_make_block, _with_element_ty, _make_tensor = block_type.__init__, block_type.with_element_ty, tensor.__init__
_equal, _numpy_dtype, _check_handle = dtype.__eq__, interpreter._get_np_dtype, Handle.__post_init__
_computation_type, _broadcast = TritonSemantic.computation_type_impl, TritonSemantic.broadcast_impl_value
_operands, _cast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.cast

_numpy_dtypes, _computation_types, _joined = {}, {}, {}


def share_types(monkeypatch):
    monkeypatch.setattr(block_type, "__init__", _make_known_block)
    monkeypatch.setattr(block_type, "with_element_ty", _with_known_element)
    monkeypatch.setattr(block_type, "to_ir", lambda self, builder: self)
    monkeypatch.setattr(tensor, "__init__", _make_known_tensor)
    monkeypatch.setattr(dtype, "__eq__", lambda self, other: self is other or _equal(self, other))
    monkeypatch.setattr(Handle, "__init__", _make_checked_handle)
    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
    monkeypatch.setattr(TritonSemantic, "computation_type_impl", computation_type)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", _broadcast_different_shapes)
    monkeypatch.setattr(TritonSemantic, "binary_op_type_checking_impl", _known_operands)
    monkeypatch.setattr(TritonSemantic, "cast", _cast_to_another)


# ---------------------------------------------------------------------- types


def _make_known_block(self, element_ty, shape):
    if type(shape) is tuple and (known := element_ty.__dict__.get("_blocks", {}).get(shape)) is not None:
        self.__dict__.update(known.__dict__)
        return
    if isinstance(shape, tl.tuple):
        shape = shape.values
    sizes = tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
    if type(shape) not in (list, tuple) or any([type(size) is not int for size in sizes]):
        _make_block(self, element_ty, shape)
        return
    known = element_ty.__dict__.setdefault("_blocks", {})
    if sizes not in known:
        _make_block(self, element_ty, shape)
        self._of_tensors, self._numbers, self._computed, self._sizes = [], {}, {}, sizes
        known[sizes] = self
    self.__dict__.update(known[sizes].__dict__)


def _with_known_element(self, element_ty):
    known = element_ty.__dict__.get("_blocks", {}).get(self._sizes)
    return _with_element_ty(self, element_ty) if known is None else known


def _make_known_tensor(self, handle, type):
    self.handle = handle
    shared = type.__dict__.get("_of_tensors")
    if not shared:
        _make_tensor(self, handle, type)
        if shared is None:
            shared = type._of_tensors = []
            type._computed = {}
        shared += type, self.dtype, self.shape, self.numel
    self.type, self.dtype, self.shape, self.numel = shared


def _make_checked_handle(self, data, dtype, attr=None):
    if "_most_bytes" not in dtype.__dict__:
        dtype._most_bytes = 8 if dtype.is_ptr() else max(1, dtype.primitive_bitwidth // 8)
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > dtype._most_bytes:
        _check_handle(self)


def numpy_dtype(tt_dtype):
    scalar = tt_dtype.scalar
    if scalar.is_ptr():
        return _numpy_dtype(tt_dtype)
    if scalar.name not in _numpy_dtypes:
        _numpy_dtypes[scalar.name] = _numpy_dtype(tt_dtype)
    return _numpy_dtypes[scalar.name]


# ---------------------------------------------------------------------- two operands


def computation_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod):
    key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
    if key not in _computation_types:
        _computation_types[key] = _computation_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
    return _computation_types[key]


def _known_operands(self, lhs, rhs, *allowed, **checked):
    """Operands of one type are taken as they are; a number becomes one operand for each tensor type."""
    left, right = type(lhs) is tensor, type(rhs) is tensor
    if not (left or right) or (lhs if left else rhs).dtype.is_ptr() or checked:
        return _operands(self, lhs, rhs, *allowed, **checked)
    if left and right:
        if rhs.dtype.is_ptr() or len(allowed) > 2:
            return _operands(self, lhs, rhs, *allowed)
        if lhs.type is rhs.type:
            return lhs, rhs
        common = computation_type(self, lhs.dtype, False, rhs.dtype, False, False)
        return _broadcast_different_shapes(
            self, _cast_to_another(self, lhs, common), _cast_to_another(self, rhs, common)
        )
    x, number = (lhs, rhs) if left else (rhs, lhs)
    if type(number) not in (int, float) or not number or number != number:  # 0.0 equals -0.0
        return _operands(self, lhs, rhs, *allowed)
    numbers, key = x.type.__dict__.setdefault("_numbers", {}), (type(number), number, allowed)
    if key not in numbers:
        found = _operands(self, lhs, rhs, *allowed)
        if found[not left] is not x:
            return found
        if len(numbers) == MOST_NUMBERS:
            numbers.clear()
        numbers[key] = found[left]
    return (x, numbers[key]) if left else (numbers[key], x)


def _broadcast_different_shapes(self, lhs, rhs):
    left, right = lhs.type.__dict__.get("_sizes", ()), rhs.type.__dict__.get("_sizes", ())
    if left == right:
        return lhs, rhs
    if (left, right) not in _joined:
        found = _broadcast(self, lhs, rhs)
        _joined[left, right] = found[0].type
        return found
    block = _joined[left, right]
    return (
        lhs if left == block._sizes else _copied(lhs, block),
        rhs if right == block._sizes else _copied(rhs, block),
    )


def _copied(x, block):
    data = np.empty(block._sizes, x.handle.data.dtype)
    data[...] = x.handle.data
    return tensor(Handle(data, x.handle.dtype.scalar), block.with_element_ty(x.type.scalar))


def _cast_to_another(self, input, dst_ty, fp_downcast_rounding=None):
    source, target = input.dtype, dst_ty.scalar
    if source is target:
        return input
    if source.name in NUMBERS and target.name in NUMBERS and fp_downcast_rounding is None:
        data = input.handle.data.astype(numpy_dtype(target))
        return tensor(Handle(data, target), input.type.with_element_ty(target))
    return _cast(self, input, dst_ty, fp_downcast_rounding)
