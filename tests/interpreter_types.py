"""Triton's interpreter looks up the types of its values instead of deriving them again for every value.

A kernel makes a value for every operation, and most of the time of the interpreter goes into its type: the shape is
unwrapped, checked, formatted and wrapped again, and the dtype of NumPy is taken from a table that is built for it. Here
Triton does so once for each element type and shape, and two operands of one shape are broadcast without comparing it
again.
"""

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def derive_types_once(monkeypatch):
    """From now on equal types share what Triton derives from their element type and shape."""
    block_type, tensor, dtype = tl.core.block_type, tl.core.tensor, tl.core.dtype
    make_block, make_tensor, equal = block_type.__init__, tensor.__init__, dtype.__eq__
    numpy_dtype, numpy_dtypes = interpreter._get_np_dtype, {}
    computation_type, computation_types = TritonSemantic.computation_type_impl, {}
    broadcast = TritonSemantic.broadcast_impl_value

    def make_known_block(self, element_ty, shape):
        if isinstance(shape, tl.tuple):
            shape = shape.values
        sizes = tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
        if type(shape) is not list or any([type(size) is not int for size in sizes]):
            make_block(self, element_ty, shape)  # which raises the error
            return
        known = element_ty.__dict__.setdefault("_blocks", {})  # of this very type, so it lives as long
        if sizes not in known:
            make_block(self, element_ty, shape)
            known[sizes] = self.__dict__ | {"_of_tensors": {}, "_sizes": sizes}
        self.__dict__.update(known[sizes])

    def make_known_tensor(self, handle, type):
        shared = type.__dict__.setdefault("_of_tensors", {})
        if not shared:
            make_tensor(self, handle, type)
            shared.update((name, value) for name, value in self.__dict__.items() if name not in ("handle", "type"))
        self.__dict__.update(shared)
        self.handle, self.type = handle, type

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
        left, right = (x.type.__dict__.get("_sizes", ()) for x in (lhs, rhs))  # () of what is no block
        return (lhs, rhs) if left == right else broadcast(self, lhs, rhs)

    monkeypatch.setattr(block_type, "__init__", make_known_block)
    monkeypatch.setattr(tensor, "__init__", make_known_tensor)
    monkeypatch.setattr(dtype, "__eq__", lambda self, other: self is other or equal(self, other))
    monkeypatch.setattr(interpreter, "_get_np_dtype", known_numpy_dtype)
    monkeypatch.setattr(TritonSemantic, "computation_type_impl", known_computation_type)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_different_shapes)
    # Triton computes whether integers overflow, by five operations for each sum and product of a kernel, for an
    # assertion that it makes in debug mode only.
    if not interpreter.InterpreterOptions().debug:
        monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
