"""The depthwise convolution: values and gradients are PyTorch's, and its kernel sums what the convolution's does."""

import pytest
import torch
from torch.nn import functional as F

from experiments.training.layers.depthwise import depthwise, weight_gradient
from experiments.training.layers.depthwise_kernel import launched

CASES = [(2, 40, 5, 3, None), (3, 17, 8, 7, None), (2, 36, 4, 3, 6), (1, 64, 6, 5, 8)]


def drawn(batch, length, width, window, side, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(batch, length, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(window if side is None else window**2, width, dtype=dtype, requires_grad=True)
    return x, weight, torch.randn(batch, length, width, dtype=dtype)


def reference(x, weight, window, side):
    width = x.shape[-1]
    if side is None:
        return F.conv1d(x.mT, weight.T[:, None], padding=window // 2, groups=width).mT
    image = x.mT.unflatten(-1, (side, side))
    kernel = weight.T.reshape(width, 1, window, window)
    return F.conv2d(image, kernel, padding=window // 2, groups=width).flatten(2).mT


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_a_convolution(case):
    x, weight, gradient = drawn(*case)
    want = reference(x, weight, *case[3:])
    got = depthwise(x, weight, case[4])
    torch.testing.assert_close(got, want)
    for mine, theirs in zip(
        torch.autograd.grad(got, (x, weight), gradient), torch.autograd.grad(want, (x, weight), gradient), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)  # a weight's gradient is in fp32


@pytest.mark.parametrize("case", [*CASES, (3, 700, 3, 3, None), (2, 1024, 130, 3, 32)])
def test_the_kernel_sums_the_gradient_of_weights(case):
    x, weight, gradient = (each.detach().float() for each in drawn(*case))
    want = weight_gradient(gradient, x, len(weight), case[4] or 0)
    torch.testing.assert_close(launched(gradient, x, len(weight), case[4] or 0), want, atol=1e-3, rtol=1e-4)


# PyTorch 2.11's compiler makes an instance of every autograd function, and warns of it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [(64, 2048, 192, 7, None), (16, 1024, 256, 3, 32)])
def test_a_compiled_convolution_on_a_gpu(case, dtype):
    x, weight, gradient = (each.detach().cuda().to(dtype) for each in drawn(*case))
    x.requires_grad_(), weight.requires_grad_()
    got = torch.autograd.grad(torch.compile(depthwise, fullgraph=True)(x, weight, case[4]), (x, weight), gradient)
    again = torch.autograd.grad(torch.compile(depthwise, fullgraph=True)(x, weight, case[4]), (x, weight), gradient)
    assert all(torch.equal(one, two) for one, two in zip(got, again, strict=True))
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    want = torch.autograd.grad(reference(*exact, *case[3:]), exact, gradient.double())
    plain = torch.autograd.grad(reference(x, weight, *case[3:]), (x, weight), gradient)
    for mine, theirs, right in zip(got, plain, want, strict=True):
        off, allowed = ((each.double() - right).abs().max().item() for each in (mine, theirs))
        assert off <= 2 * allowed + max(1e-6, torch.finfo(dtype).eps) * right.abs().max().item()
