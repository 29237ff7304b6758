"""Every backend agrees with dense attention in fp64 as closely as a plain implementation in the same dtype does.

Forward, lse and the three gradients, for drawn shapes, masks, heads, layouts and scales. The kernel runs in Triton's
interpreter on small shapes here, and with `-m gpu` compiled, on larger ones and in bf16.
"""

import contextlib
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from closeness import Results, assert_exact
from sparseflash import attention
from strategies import problems

HALF = (torch.float16, torch.bfloat16)
SINGLE = (torch.float32,)


def results(problem, backend, device, dtype=None):
    """The results of a problem from one backend, its inputs first rounded to the problem's dtype, then cast."""
    q, k, v, dout, dlse = problem.tensors(device)
    if dtype is not None:
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
        dout, dlse = dout.to(dtype), dlse.to(torch.promote_types(dtype, torch.float32))
    mask = problem.mask if problem.mask is None else problem.mask.to(device)
    out, lse = attention(q, k, v, mask, scale=problem.scale, return_lse=True, backend=backend)
    return Results(out, lse, *torch.autograd.grad((out, lse), (q, k, v), (dout, dlse)))


def check(problem, backend, device="cpu"):
    got = results(problem, backend, device)
    plain = results(problem, "reference", device)
    truth = results(problem, "reference", device, torch.float64)
    label = {
        "backend": backend,
        "device": device,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "dim": problem.dim,
        "v_dim": problem.v_dim,
        "tokens": max(problem.q_len, problem.k_len),
        "problem": repr(problem),
    }
    assert_exact(got, plain, truth, label)


@contextlib.contextmanager
def loads(way):
    """The kernel loads its tiles by tensor descriptors whenever the tensors allow it, or always by pointers."""
    from sparseflash.kernels import launch

    with mock.patch.object(launch, "_PRODUCTS_FOR_DESCRIPTORS", 0 if way == "descriptors" else 1 << 62):
        yield


@given(problems(most_tokens=300, head_dims=(1, 8, 16, 40), value_dims=(1, 16, 24), blocks=(16, 32, 64, 128),
                dtypes=(torch.float64, torch.float32, *HALF)))  # fmt: skip
@settings(max_examples=4 * settings().max_examples)
def test_blockwise_is_exact(problem):
    check(problem, "blockwise")


@pytest.mark.parametrize("way", ["pointers", "descriptors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@given(data=st.data())
def test_the_kernel_is_exact_in_the_interpreter(dtype, way, data):
    problem = data.draw(
        problems(most_tokens=70, head_dims=(16, 24, 32), value_dims=(16, 24), blocks=(16, 32, 64), dtypes=(dtype,))
    )
    with loads(way):
        check(problem, "triton")


# Each pair of dtype and head dims compiles its own kernels, so what else makes a new kernel is rationed.
_GPU_CASES = [
    pytest.param(dtype, dims, way, id=f"{str(dtype)[6:]}-D{dims[0]}-Dv{dims[1]}-{way}")
    for dtype in (*SINGLE, *HALF)
    for dims in [(16, 16), (32, 32), (64, 64), (72, 72), (80, 48), (96, 128), (128, 128), (192, 64), (256, 256)]
    for way in ("pointers", "descriptors")
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "dims", "way"), _GPU_CASES)
def test_the_kernel_is_exact_on_the_gpu(dtype, dims, way):
    blocks = ((16, 64, 128), (32, 128), (64, 256))[(dims[0] // 8 + (way == "pointers")) % 3]

    @given(problems(most_tokens=700, head_dims=dims[:1], value_dims=dims[1:], blocks=blocks, dtypes=(dtype,)))
    @settings(max_examples=2 * settings().max_examples)
    def run(problem):
        with loads(way):
            check(problem, "triton", "cuda")

    run()
