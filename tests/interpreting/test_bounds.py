import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def copy(x_ptr, out_ptr, first, stop, SIZE: tl.constexpr):
    at = first + tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < stop, other=0.0))


@triton.jit
def fill(out_ptr, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, 1.0, mask=at < count)


def test_what_lies_inside_is_read_and_written():
    buffer = torch.arange(40.0)
    x, out = buffer[4:20], torch.zeros(16)
    copy[(1,)](x, out, 0, 16, SIZE=16)
    assert torch.equal(out, x)


@pytest.mark.parametrize(("first", "stop"), [(0, 17), (-1, 15), (1000, 1010)])
def test_reading_around_a_tensor_is_noticed_even_in_its_own_buffer(first, stop):
    buffer, out = torch.arange(4000.0), torch.zeros(4000)
    with pytest.raises(InterpreterError, match=r"a kernel reads \d+ of \d+ numbers outside its arguments"):
        copy[(1,)](buffer[4:20], out[2000:], first, stop, SIZE=32)


def test_writing_past_the_end_is_noticed_and_a_mask_that_keeps_inside_is_not():
    buffer = torch.zeros(32)
    fill[(1,)](buffer[:9], 9, SIZE=16)
    with pytest.raises(InterpreterError, match="a kernel writes 1 of 10 numbers outside its arguments"):
        fill[(1,)](buffer[:9], 10, SIZE=16)
    assert buffer.sum() == 9
