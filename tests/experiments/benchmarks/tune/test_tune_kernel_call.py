"""A kernel called by itself gives the same results as inside an attention."""

import pytest
import torch

from experiments.benchmarks.tune.kernel_call import KernelOfAttention
from sparseflash import attention, masks
from sparseflash.backends.triton.configs import Config
from sparseflash.backends.triton.overrides import always_split, override


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kernel", ["forward", "dq", "dk_dv"])
def test_its_results_are_those_of_the_attention(kernel, dtype, split):
    mask = masks.butterfly(48, block=16)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 48, 16, generator=generator).to(dtype) for _ in range(4))
    with override(**({"splits": always_split(16)} if split else {})):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, mask, backend="triton")
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        subject = KernelOfAttention(kernel, mask, q, k, v, dout)
        call = subject.call()
    call.run()
    wanted = {"forward": [out.detach()], "dq": [dq], "dk_dv": [dk, dv]}[kernel]
    assert all(torch.equal(got, want) for got, want in zip(call.results, wanted, strict=True))


def test_calls_have_choices_and_results_of_their_own():
    mask = masks.local(64, window=20, block=32)
    q, k, v, dout = (torch.randn(1, 1, 64, 16).half() for _ in range(4))
    subject = KernelOfAttention("dq", mask, q, k, v, dout)
    shipped = subject.call()
    with override(configs={"dq": Config(16, 16, 1, 1)}, descriptors=False):
        other = subject.call()
    assert other.choice.config == Config(16, 16, 1, 1) != shipped.choice.config
    assert shipped.choice.descriptors and not other.choice.descriptors
    shipped.run()
    before = shipped.results[0].clone()
    other.results[0].zero_()
    other.run()
    assert torch.equal(shipped.results[0], before)
    torch.testing.assert_close(other.results[0], before, rtol=1e-2, atol=1e-2)
