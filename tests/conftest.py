"""Settings of the whole test run: Hypothesis profiles, Triton's mode, threads.

Triton decides between its interpreter and its compiler when it is imported, so one run has one mode:

    pytest           the interpreter, on the CPU; tests marked `gpu` are skipped
    pytest -m gpu    the compiler, on a CUDA device; only tests marked `gpu` run

    pytest -m gpu --compile-ahead    the compiler alone, on any machine: see compiling/ahead.py
"""

import gc
import os
import re
import sys
from functools import partial
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

# Choose another with --hypothesis-profile=long. A test that needs fewer or more examples scales the number: see
# `drawn/counts.py`.
settings.register_profile(
    "dev", max_examples=25, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True)
settings.register_profile("long", parent=settings.get_profile("dev"), max_examples=1000)
# tests/backends/test_exactness.py then draws more than 20,000 cases with -m gpu.
settings.register_profile("many", parent=settings.get_profile("dev"), max_examples=125)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def asks_for_gpu(config):
    return re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")) is not None


def pytest_addoption(parser):
    parser.addoption(
        "--compile-ahead",
        action="store_true",
        help="with -m gpu: compile what the exactness tests launch, run nothing",
    )


def pytest_configure(config):
    if config.getoption("compile_ahead") and not asks_for_gpu(config):
        raise pytest.UsageError("--compile-ahead compiles what tests on a GPU launch: add -m gpu")
    # Not from sys.argv, which a worker of pytest-xdist lacks.
    if "triton" in sys.modules:
        raise pytest.UsageError("triton was imported before tests/conftest.py could choose its mode")
    if asks_for_gpu(config):
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = "1"

    gc.set_threshold(1_000_000, 20, 100)

    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)
        if asks_for_gpu(config) and torch.cuda.device_count() > 1:
            worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
            torch.cuda.set_device(worker % torch.cuda.device_count())


def pytest_collection_finish():
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # otherwise Triton's bindings complain of leaks at exit


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    import torch

    # Otherwise what a test draws depends on the tests that its worker ran before. Without a GPU torch.manual_seed notes
    # where it was called, which takes 0.4 ms.
    seed = torch.manual_seed if asks_for_gpu(item.config) else torch.default_generator.manual_seed
    seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    from tests.processes.frame_stack import in_one_piece

    item.runtest = partial(in_one_piece, item.runtest)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    result = yield
    if (nextitem is None or nextitem.path != item.path) and not asks_for_gpu(item.config):
        # Without freezing, each collection takes up to half a second.
        gc.collect()
        gc.freeze()
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        # Two threads in each of two workers wait for one another.
        left = torch.get_num_threads()
        torch.set_num_threads(1)
        assert left == 1, f"a test must leave PyTorch with the one thread that it found; got {left}"
    return result


@pytest.fixture(scope="session", autouse=True)
def kernels_run_as_on_a_gpu(request):
    if asks_for_gpu(request.config):
        yield
        return
    from tests.interpreting import interpret_quickly
    from tests.interpreting.bounds import watch_addresses
    from tests.interpreting.products import summed_alike_in_either_order

    with pytest.MonkeyPatch.context() as monkeypatch:
        watch_addresses(monkeypatch)
        interpret_quickly(monkeypatch)
        monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder.create_dot", summed_alike_in_either_order)
        yield


@pytest.fixture(scope="session", autouse=True)
def masks_are_made_anew():
    """Two calls with the same arguments give two masks, which tests compare; `masks_are_kept` undoes this."""
    from sparseflash.blockmask.cache import clear_caches
    from sparseflash.masks.tiling import signatures

    clear_caches()  # of masks that modules of tests have made while they were collected
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(signatures, "SMALL_MASK", -1)
        yield


@pytest.fixture
def masks_are_kept(monkeypatch):
    from sparseflash.blockmask.cache import SMALL_MASK, clear_caches
    from sparseflash.masks.tiling import signatures

    monkeypatch.setattr(signatures, "SMALL_MASK", SMALL_MASK)
    clear_caches()
    yield
    clear_caches()


@pytest.fixture(scope="session", autouse=True)
def kernels_are_compiled_ahead(request):
    if request.config.getoption("compile_ahead"):
        from tests.compiling.ahead import compiling

        yield from compiling({item.module for item in request.session.items})
    else:
        yield


@pytest.fixture
def small_blocks_of_dense_attention(monkeypatch):
    from sparseflash.backends import problem

    monkeypatch.setattr(problem, "DENSE_BLOCK", 16)


# The slowest files. They must not come last, or one worker of pytest-xdist is left alone with them.
_LONG = (
    "test_distributed_attention.py", "test_compile.py", "test_tile_bias.py", "test_exactness.py",
    "test_registration.py", "test_lm_train.py", "test_huggingface_benchmark.py", "test_dropout.py", "test_fuzz.py",
    "test_hopper_scores.py", "test_fused_backward_plan.py", "test_hopper_backward.py", "test_lm_compare.py",
    "test_scores.py", "test_passes.py", "test_lra_train.py", "test_lra_distributed.py", "test_pathx_train.py",
)  # fmt: skip


def pytest_collection_modifyitems(config, items):
    def place(item):
        return _LONG.index(item.path.name) if item.path.name in _LONG else len(_LONG)

    items.sort(key=place)
    if config.getoption("compile_ahead"):
        from tests.compiling.ahead import is_compiled

        kept = [item for item in items if is_compiled(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
        return
    if not asks_for_gpu(config):
        reason = "needs the Triton compiler and a CUDA device: pytest -m gpu"
        skipped = [item for item in items if item.get_closest_marker("gpu")]
    else:
        import torch

        reason = "needs a CUDA device" if not torch.cuda.is_available() else "runs in the interpreter: leave out -m gpu"
        skipped = [item for item in items if not (torch.cuda.is_available() and item.get_closest_marker("gpu"))]
    for item in skipped:
        item.add_marker(pytest.mark.skip(reason=reason))
    if find_spec("transformers") is None:
        for item in items:
            if item.path.parts[-2:] == ("huggingface", "__init__.py"):
                item.add_marker(
                    pytest.mark.skip(reason="needs Transformers, whose versions from 5.21 on need Python 3.11")
                )
