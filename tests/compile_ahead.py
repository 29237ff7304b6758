"""Compiles what the exactness tests run on a GPU, where there is none: `pytest -m gpu --compile-ahead`.

Every kernel is compiled for an H100 as the test would launch it, and not started; nothing is computed or compared. A
test fails where a kernel does not compile, asks for more shared memory than there is, or reads one address under two
layouts. What is compiled stays in Triton's cache, so that the same Triton on a machine with a GPU need not compile it
again. Tests that compare in other ways than `test_exactness.check` are left out.
"""

from unittest import mock

import torch

ARCH, SHARED_MEMORY = 90, 232_448  # bytes a program may have

_checked = set()  # the code that has been looked at


def compiling(modules):
    """While this context lasts, `check` of test_exactness compiles, wherever a module has imported it."""
    from contextlib import ExitStack

    from experiments.compile.report import compiling_for
    from sparseflash.kernels import op

    with ExitStack() as stack:
        compiled = stack.enter_context(compiling_for(ARCH))
        stack.enter_context(mock.patch.object(op, "_check", lambda *tensors: None))  # that they lie on a GPU

        def check(problem, backend, device="cpu", arithmetic=None):
            compiled.clear()
            launched(problem)
            for name, kernel in compiled:
                inspect(name, kernel)

        for module in modules:
            stack.enter_context(mock.patch.object(module, "check", check))
        yield


def launched(problem):
    """Launches the forward and backward of a problem on the CPU, where launches only compile."""
    from sparseflash import attention

    q, k, v, dout, dlse = problem.tensors("cpu")
    out, lse = attention(
        q, k, v, problem.mask, scale=problem.scale, return_lse=True, dropout_p=problem.dropout_p, seed=problem.seed,
        backend="triton",
    )  # fmt: skip
    # Nothing was written to them, and a gradient takes no notice.
    torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))


def inspect(name, kernel):
    from experiments.compile.report import has_two_layouts

    if kernel.hash in _checked:
        return
    _checked.add(kernel.hash)
    assert kernel.metadata.shared <= SHARED_MEMORY, f"{name} asks for {kernel.metadata.shared} bytes of shared memory"
    assert not has_two_layouts(kernel.asm["ptx"]), f"{name} reads one address under two layouts"
