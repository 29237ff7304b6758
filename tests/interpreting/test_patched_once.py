import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter


@triton.jit
def doubled(x):
    return tl.sum(tl.reshape(x, (1, 16)), 0) * 2


@triton.jit
def double_often(x_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, 16)
    x = tl.load(x_ptr + at)
    for _ in range(COUNT):
        x = doubled(x)
    tl.store(out_ptr + at, x)


def test_device_functions_find_the_language_as_the_kernel_left_it(monkeypatch):
    looked_through = []
    patch_core = interpreter._patch_lang_core
    monkeypatch.setattr(
        interpreter, "_patch_lang_core", lambda lang, scope: (looked_through.append(lang), patch_core(lang, scope))
    )
    at_rest = tl.load, tl.tensor.__add__, tl.range
    x, out = torch.randn(16), torch.zeros(16)
    for _ in range(2):
        looked_through.clear()
        double_often[(3,)](x, out, COUNT=4)
        assert torch.equal(out, 16 * x)
        # tl for the kernel, and both for tl.sum; not for each of the 12 calls.
        assert looked_through[0] is tl and len(looked_through) <= 3
        assert (tl.load, tl.tensor.__add__, tl.range) == at_rest


def test_a_launch_that_fails_leaves_the_next_one_its_own():
    x, out = torch.randn(16), torch.zeros(16)
    with pytest.raises(interpreter.InterpreterError, match="outside its arguments"):
        double_often[(1,)](x, out[:3], COUNT=1)
    double_often[(1,)](x, out, COUNT=1)
    assert torch.equal(out, 2 * x)
