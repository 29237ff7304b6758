"""Compiles the kernels of the exactness tests on a machine without a GPU: `pytest -m gpu --compile-ahead`.

Kernels are compiled for an H100 as the tests would launch them, not run. Triton's cache then serves a machine with a
GPU. Tests that do not compare by `exactness.check` or `scored.check` are left out.
"""

from contextlib import ExitStack
from unittest import mock

from sparseflash.backends.triton.architecture import architecture_of
from tests.compared import exactness, scored

ARCH = 90
SHARED_MEMORY = architecture_of(divmod(ARCH, 10)).shared_memory

_checked = set()


def is_compiled(item):
    of_module = getattr(getattr(item, "module", None), "check", None)
    is_replaced = of_module in (exactness.check, scored.check)
    return item.get_closest_marker("gpu") is not None and is_replaced and "exact_on_the_gpu" in item.name


def compiling(modules):
    from experiments.benchmarks.compile.without_gpu import compiling_for

    with ExitStack() as stack:
        compiled = stack.enter_context(compiling_for(ARCH))

        def compiles(results):
            def check(case, backend, device="cpu", arithmetic=None):
                compiled.clear()
                results(case, backend, "cpu")  # launches only compile, so the numbers are arbitrary
                for name, kernel in compiled:
                    inspect(name, kernel)

            return check

        replaced = {exactness.check: compiles(exactness.results), scored.check: compiles(scored.results)}
        for module in modules:
            stack.enter_context(mock.patch.object(module, "check", replaced[module.check]))
        yield


def inspect(name, kernel):
    from experiments.benchmarks.compile.report import has_two_layouts

    if kernel.hash in _checked:
        return
    assert kernel.metadata.shared <= SHARED_MEMORY, f"{name} asks for {kernel.metadata.shared} bytes of shared memory"
    assert not has_two_layouts(kernel.asm["ptx"]), f"{name} reads one address under two layouts"
    _checked.add(kernel.hash)
