"""Compiles what the exactness tests run on a GPU, where there is none: `pytest -m gpu --compile-ahead`.

Every kernel is compiled for an H100 as the test would launch it, and not started; nothing is computed or compared. A
test fails where a kernel does not compile, asks for more shared memory than there is, or reads one address under two
layouts. What is compiled stays in Triton's cache, so that the same Triton on a machine with a GPU need not compile it
again. Tests that compare in other ways than `exactness.check` and `scored.check` are left out.
"""

from contextlib import ExitStack
from unittest import mock

import exactness
import scored
from sparseflash.backends.triton.shared_memory import shared_memory

ARCH = 90
SHARED_MEMORY = shared_memory(ARCH)

_checked = set()  # the code that has been looked at


def is_compiled(item):
    """Whether a test does no more than compare results by one of the functions that are replaced."""
    of_module = getattr(getattr(item, "module", None), "check", None)
    is_replaced = of_module in (exactness.check, scored.check)  # others need a GPU for what they look at
    return item.get_closest_marker("gpu") is not None and is_replaced and "exact_on_the_gpu" in item.name


def compiling(modules):
    """While this context lasts, `check` compiles, wherever a module has imported it."""
    from experiments.benchmarks.compile.without_gpu import compiling_for

    with ExitStack() as stack:
        compiled = stack.enter_context(compiling_for(ARCH))

        def compiles(results):
            def check(case, backend, device="cpu", arithmetic=None):
                compiled.clear()
                results(case, backend, "cpu")  # where launches only compile, so these are nobody's numbers
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
