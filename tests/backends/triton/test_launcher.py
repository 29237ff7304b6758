"""Launching what Triton has compiled: the same as Triton's own launch, hooks and all, in less time."""

import weakref
from unittest import mock

import pytest
import torch
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher

from sparseflash import attention, masks
from sparseflash.backends.triton.launcher import Prepared, launches_as_known, starter

GPU = torch.device("cuda", 0)


class Compiled:
    """A kernel as Triton compiles it, which writes down how it is launched."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launcher):
        self.plain = []
        self.run = launcher()

    def __getitem__(self, grid):
        return lambda *arguments: self.plain.append((grid, arguments))


class Known:
    """A launcher as Triton's are."""

    def __init__(self):
        self.launched = []

    def __call__(
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata, launch_enter_hook,
        launch_exit_hook, *args,
    ):  # fmt: skip
        hooks = launch_metadata, launch_enter_hook, launch_exit_hook
        self.launched.append(((gridX, gridY, gridZ), stream, function, kernel_metadata, hooks, args))


class Other(Known):
    def __call__(self, grid, stream, *args):
        raise AssertionError("called")


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 40 + device, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)


def test_the_launchers_of_this_triton_are_known():
    assert launches_as_known(CudaLauncher) and launches_as_known(Known) and not launches_as_known(Other)


def test_a_launch_hands_over_what_triton_would():
    compiled = Compiled(Known)
    starter(compiled, (7, 1, 1), GPU)(1, 2.0, (3, 4))
    stream = torch._C._cuda_getCurrentRawStream(0)
    assert compiled.run.launched == [((7, 1, 1), stream, "function", "metadata", (None,) * 3, (1, 2.0, (3, 4)))]
    assert not compiled.plain


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_left_to_triton(name):
    compiled = Compiled(Known)
    start = starter(compiled, (7, 1, 1), GPU)
    hooks = getattr(knobs.runtime, name)

    def hook(*arguments):
        raise AssertionError("Triton calls it, not we")

    hooks.add(hook)
    try:
        start(1)
    finally:
        hooks.remove(hook)
    assert compiled.plain == [((7, 1, 1), (1,))] and not compiled.run.launched


def test_an_unknown_launcher_is_left_to_triton():
    compiled = Compiled(Other)
    starter(compiled, (7, 1, 1), GPU)(1)
    assert compiled.plain == [((7, 1, 1), (1,))]


@pytest.mark.parametrize(("limit", "option"), [((), {}), ((0,), {}), ((168,), {"maxnreg": 168})], ids=str)
def test_registers_are_limited_where_a_limit_is_given(limit, option):
    asked = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: asked.append((grid, arguments, options))

    Prepared(Kernel(), 7, torch.device("cpu"), 4, 2, *limit).run("q")
    assert asked == [((7, 1, 1), ("q",), {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True} | option)]


def test_bound_arguments_are_addresses_of_tensors_that_stay_alive():
    prepared, compiled = Prepared(None, 7, GPU, 4, 2), Compiled(Known)
    prepared._start = starter(compiled, (7, 1, 1), GPU)
    q, index = torch.ones(2), torch.ones(3)
    address, alive = index.data_ptr(), weakref.ref(index)
    launch = prepared.bound(index, None, 5)
    del index
    launch(q)
    (*_, arguments) = compiled.run.launched[0]
    assert arguments == (q.data_ptr(), address, None, 5)
    assert alive() is not None
    del launch
    assert alive() is None


def test_another_current_gpu_is_left_for_the_launch(monkeypatch):
    prepared, compiled = Prepared(None, 7, GPU, 4, 2), Compiled(Known)
    prepared._start = starter(compiled, (7, 1, 1), GPU)
    launch = prepared.bound(5)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    q = torch.ones(2)
    with mock.patch.object(Prepared, "run") as run:
        launch(q)
    assert run.call_args.args[0] is q and run.call_args.args[1] == 5 and not compiled.run.launched


@pytest.mark.gpu
def test_hooks_see_the_repeats_of_a_call():
    mask = masks.butterfly(256).to("cuda")
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attention(q, k, v, mask)
    seen = []

    def hook(metadata):
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        attention(q, k, v, mask)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    attention(q, k, v, mask)
    assert seen == ["forward_kernel"]
