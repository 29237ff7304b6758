import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_semantic


@triton.jit
def operate(out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, half, whole = at.to(tl.float32) - 1.5, (at + 1).to(tl.float16), at - 2
    zero, minus_zero = x * 0.0 + 0.0, x * 0.0 * -0.0
    results = (x + 2, 2 + x, x + 2.0, x < 1, 3 - x, x / 2, whole + 2, 2 - whole, whole // 2, whole % 3, whole / 4)
    results = (
        *results, half / 3, half / (half + 1), half + 3, half * x, whole + x, x + zero, minus_zero + 0.0,
        minus_zero * 1.0,
    )  # fmt: skip
    results = (*results, (x > 0) & (whole > 0), whole & 1, (x > 0) | (x < -1), tl.where(x > 0, x, 1), whole + True)
    for row in tl.static_range(len(results)):
        tl.store(out_ptr + row * SIZE + at, results[row].to(tl.float32))


def test_operands_are_promoted_as_in_pytorch_whatever_was_computed_before():
    at = torch.arange(4)
    x, half, whole = at - 1.5, (at + 1).half(), at.int() - 2
    zero = x * 0.0 + 0.0
    expected = [x + 2, 2 + x, x + 2.0, x < 1, 3 - x, x / 2, whole + 2, 2 - whole]
    expected += [torch.div(whole, 2, rounding_mode="trunc"), torch.fmod(whole, 3), whole / 4]
    expected += [half.float() / 3, half.float() / (half + 1).float(), half + 3, half.float() * x, whole + x, x + zero]
    expected += [x * 0.0 * -0.0 + 0.0, x * 0.0 * -0.0, (x > 0) & (whole > 0), whole & 1, (x > 0) | (x < -1)]
    expected += [torch.where(x > 0, x, 1), whole + 1]
    for _ in range(2):
        out = torch.empty(len(expected), 4)
        operate[1,](out, SIZE=4)
        for found, wanted in zip(out, expected, strict=True):
            assert torch.equal(found, wanted.float())
            assert torch.equal(found.signbit(), wanted.float().signbit())


@triton.jit
def cast_and_broadcast(out_ptr, pid_of, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)[:, None]
    columns = tl.arange(0, SIZE)[None, :]
    x, number = rows - 1.7 * columns, tl.load(pid_of)
    results = (
        rows + columns,
        columns * rows,
        x + tl.arange(0, SIZE),
        number - x,
        rows < number,
        x.to(tl.float16) + columns,
        (rows - 0.5 * columns).to(tl.bfloat16).to(tl.float32) * rows,
        (x * 1000.3).to(tl.float16).to(tl.int32) + 0 * rows,
        x.to(tl.int32) & (columns > rows),
        ((rows + columns).to(tl.uint8) - 3).to(tl.int32),
        (rows - columns).to(tl.int1) & (rows > number),
        number.to(tl.float32) / (rows + 1) + 0 * columns,
        (columns > 1).to(tl.float32) * rows,
    )
    for at in tl.static_range(len(results)):
        tl.store(out_ptr + at * SIZE * SIZE + rows * SIZE + columns, results[at].to(tl.float32))


def test_casts_and_broadcast_operands_are_those_of_pytorch():
    at, number = torch.arange(4), torch.tensor([2])
    rows, columns = at[:, None].expand(4, 4), at.expand(4, 4)
    x = rows - 1.7 * columns
    expected = [rows + columns, columns * rows, x + at, number - x, rows < number, x.half() + columns]
    expected += [(rows - 0.5 * columns).bfloat16() * rows, (x * 1000.3).half().int(), x.int() & (columns > rows)]
    expected += [((rows + columns).byte() - 3).int(), (rows != columns) & (rows > number)]
    expected += [number.float() / (rows + 1), (columns > 1) * rows]
    for _ in range(2):
        out = torch.empty(len(expected), 4, 4)
        cast_and_broadcast[1,](out, number, SIZE=4)
        for found, wanted in zip(out, expected, strict=True):
            assert torch.equal(found, wanted.float())


def as_triton_computes(name, x, y):
    semantic = interpreter_semantic
    if name in ("add", "sub", "mul"):
        return getattr(semantic, name)(x, y, sanitize_overflow=False)
    if name in ("radd", "rsub", "rmul"):
        return getattr(semantic, name[1:])(y, x, sanitize_overflow=False)
    if name in ("and", "or"):
        return getattr(semantic, f"{name}_")(x, y)
    ways = {"lt": "less_than", "le": "less_equal", "gt": "greater_than", "ge": "greater_equal"}
    return getattr(semantic, {**ways, "eq": "equal", "ne": "not_equal"}[name])(x, y)


# With Triton 3.6, NumPy raises if a number does not fit.
REFUSALS = (ValueError, TypeError, OverflowError, triton.language.semantic.IncompatibleTypeErrorImpl)


def assert_computed_alike(name, x, y):
    try:
        wanted = as_triton_computes(name, x, y)
    except REFUSALS:
        for _ in range(2):
            with pytest.raises(REFUSALS):
                getattr(x, f"__{name}__")(y)
        return
    for _ in range(2):
        found = getattr(x, f"__{name}__")(y)
        assert (found.type, found.dtype) == (wanted.type, wanted.dtype)
        ours, theirs = found.handle.data, wanted.handle.data
        assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())


def check_operators(x, others):
    for name in ("add", "sub", "mul", "and", "or", "lt", "le", "gt", "ge", "eq", "ne"):
        for other in others:
            assert_computed_alike(name, x, other)
    for name in ("radd", "rsub", "rmul"):
        for other in others:
            if not isinstance(other, tl.tensor):
                assert_computed_alike(name, x, other)


@triton.jit
def compute_everything(x_ptr, y_ptr, numbers: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    check_operators(x, (y, y[:, None], y[None, :], tl.load(y_ptr), *numbers))
    check_operators(x[:, None], (y, y[:, None], y[None, :], tl.load(y_ptr), *numbers))
    check_operators(tl.load(x_ptr), (y, y[:, None], tl.load(y_ptr), *numbers))
    check_operators(x_ptr, (at, y, tl.load(y_ptr), *numbers))
    check_operators(y_ptr + at, (x, x[:, None], tl.load(x_ptr), *numbers))


DTYPES = (torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("y_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_operators_compute_what_triton_computes(x_dtype, y_dtype):
    numbers = (0, 1, 2, -3, 2.5, 0.0, -0.0, -1e-3, 2**31, 2**40, True)
    if x_dtype is not y_dtype or x_dtype is torch.bfloat16:
        numbers = ()
    x, y = torch.tensor([0, 1, 3, 5]).to(x_dtype), torch.tensor([3, 1, 0, 2]).to(y_dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        compute_everything[1,](x, y, numbers, SIZE=4)
