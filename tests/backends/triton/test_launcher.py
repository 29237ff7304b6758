import ast
import threading
import weakref
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from experiments.benchmarks.calls import through_triton
from sparseflash import attention, cuda_driver, masks
from sparseflash.backends.triton import compile_ahead, launcher, native
from sparseflash.backends.triton.launcher import BoundLaunch, Describe, Launch, LaunchSequence, Variant
from sparseflash.blockmask import streams

GPU = torch.device("cuda", 0)
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("package", ["sparseflash", "experiments"])
def test_no_launch_leaves_fused_operations_to_tritons_default(package):
    """Triton 3.9 warns of its default, and 3.10 changes it, and with it the bits of results."""
    launches = [
        call
        for file in (ROOT / package).rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
        and isinstance(call.func.value, ast.Name) and call.func.value.id.endswith("_kernel")
    ]  # fmt: skip
    assert launches
    for call in launches:
        named = {each.arg or ast.unparse(each.value) for each in call.keywords}
        assert named & {"OPTIONS", "enable_fp_fusion"}, ast.unparse(call)


class Kernel:
    __name__ = "kernel"
    arg_names = ("x_ptr", "work_ptr", "scale", "y_ptr", "SIZE")

    def __init__(self, bytes_a_stage=0):
        self.warmed, self.asked, self.loaded = [], [], []
        self.bytes_a_stage = bytes_a_stage
        self.metadata = SimpleNamespace(shared=0, target=SimpleNamespace(arch=90))

    def warmup(self, *arguments, grid, **options):
        self.warmed.append((arguments, options))
        self.metadata.shared = options["num_stages"] * self.bytes_a_stage
        return self

    @property
    def run(self):
        self.loaded.append("by Triton")

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.asked.append((grid, arguments, options))


class Started:
    def __init__(self, function, metadata, parameters, arguments, given):
        assert metadata is function.metadata
        made.append(self)
        self.kernel, self.arguments, self.given, self.programs = function, list(arguments), dict(given), 0

    def bound(self, programs, tensors):
        bound = Started(self.kernel, self.kernel.metadata, [], self.arguments, self.given)
        bound.programs = programs
        for x in tensors:
            name = next(iter(bound.given))
            bound.arguments[bound.given.pop(name)] = x
        return bound

    def start(self, programs, given, stream):
        assert stream == 1234
        arguments = list(self.arguments)
        for slot, (name, place) in enumerate(self.given.items()):
            arguments[place] = given[name if isinstance(given, dict) else slot]
        calls.append((self.kernel, programs, arguments))
        status = results.pop() if results else 0
        return (0, status) if status else None


def start(kernels, given, stream):
    together.append(len(kernels))
    for number, kernel in enumerate(kernels):
        failed = kernel.start(kernel.programs, given, stream)
        if failed is not None:
            return number, failed[1]
    return None


calls, together, results, made = [], [], [], []


def calls_of(kernel):
    return [(programs, arguments) for started, programs, arguments in calls if started is kernel]


@pytest.fixture(autouse=True)
def no_gpu(request, monkeypatch):
    if request.node.get_closest_marker("gpu"):
        return
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1234, raising=False)
        monkeypatch.setattr(launcher, "on_device", lambda device: mock.MagicMock())
        monkeypatch.setattr(streams, "is_capturing", lambda device: False)
    monkeypatch.setattr(launcher, "parameters_of_compiled", lambda compiled, names: [])
    monkeypatch.setattr(launcher, "loaded", lambda compiled, device: compiled.loaded.append("directly") or compiled)
    monkeypatch.setattr(launcher, "kernel_of", Started)
    monkeypatch.setattr(native, "module", lambda: SimpleNamespace(start=start))
    for each in (calls, together, results, made):
        each.clear()


def variant(kernel, **options):
    return Variant(kernel, {"SIZE": 8}, GPU, **{"num_warps": 4, "num_stages": 2, **options})


def launch_of(kernel, **described):
    examples = {name: torch.empty(2, 16, dtype=torch.float16, device="meta") for name in ("x_ptr", "y_ptr")}
    return Launch(variant(kernel), {"scale": 0.5}, examples, described, bound=("work_ptr",))


def named(x, y):
    return {"x_ptr": x, "y_ptr": y}


def test_this_triton_is_one_whose_kernels_are_started_directly():
    assert launcher.is_measured(launcher.triton_version())


def test_a_kernel_is_compiled_and_loaded_once_and_started_directly_from_the_first_launch_on():
    kernel = Kernel()
    x, y, work = (torch.ones(2, 16, dtype=torch.float16) for _ in range(3))
    launch = launch_of(kernel).bind(7, work_ptr=work)
    launch(named(x, y)), launch(named(y, x))
    ((arguments, options),) = kernel.warmed
    assert options == {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    assert arguments[0] is x and arguments[1] is work and arguments[3] is y and arguments[2::2] == (0.5, 8)
    assert kernel.loaded == ["directly"] and not kernel.asked
    for (programs, arguments), first, second in zip(calls_of(kernel), (x, y), (y, x), strict=True):
        assert programs == 7 and arguments[2::2] == [0.5, 8]
        assert arguments[0] is first and arguments[1] is work and arguments[3] is second


def test_a_kernel_that_another_thread_compiles_is_started_directly_only_when_all_is_ready():
    kernel, ready = Kernel(), []

    class Watched(Variant):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if hasattr(self, "_prepared") and self.can_start_directly():
                ready.append((self._function, self._compiled))

    Watched(kernel, {"SIZE": 8}, GPU, num_warps=4, num_stages=2).compile([])
    assert ready == [(kernel, kernel)]


@pytest.mark.parametrize(("bytes_a_stage", "tried"), [(58_112, [4]), (58_113, [4, 3]), (232_449, [4, 3, 2, 1])])
def test_a_kernel_that_does_not_fit_in_shared_memory_gets_fewer_stages_when_it_is_compiled(bytes_a_stage, tried):
    kernel = Kernel(bytes_a_stage)
    x, work = (torch.ones(2, 16, dtype=torch.float16) for _ in range(2))
    examples = {name: torch.empty_like(x, device="meta") for name in ("x_ptr", "y_ptr")}
    made = variant(kernel, num_stages=4)
    launch = Launch(made, {"scale": 0.5}, examples, {}, bound=("work_ptr",)).bind(1, work_ptr=work)
    launch(named(x, x)), launch(named(x, x))
    assert [options["num_stages"] for _, options in kernel.warmed] == tried
    assert made.options == kernel.warmed[-1][1]


def test_launches_of_one_variant_have_work_of_their_own():
    kernel = Kernel()
    x, first, second = (torch.ones(2, 16, dtype=torch.float16) for _ in range(3))
    unbound = launch_of(kernel)
    one, two = unbound.bind(1, work_ptr=first), unbound.bind(2, work_ptr=second)
    one(named(x, x)), two(named(x, x)), one(named(x, x))
    assert len(kernel.warmed) == 1
    assert [(programs, arguments[1] is first) for programs, arguments in calls_of(kernel)] == [
        (1, True), (2, False), (1, True),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["parameters_of_compiled", "loaded"])
def test_a_kernel_that_cannot_be_started_directly_is_left_to_triton(monkeypatch, name):
    monkeypatch.setattr(launcher, name, lambda compiled, *more: None)
    kernel, x, work = Kernel(), *(torch.ones(2, 16, dtype=torch.float16) for _ in range(2))
    launch = launch_of(kernel).bind(3, work_ptr=work)
    launch(named(x, x)), launch(named(x, x))
    assert kernel.loaded == ["by Triton"] and len(kernel.warmed) == 1 and not calls
    for grid, arguments, options in kernel.asked:
        assert grid == (3, 1, 1) and options == kernel.warmed[0][1]
        assert arguments[0] is x and arguments[1] is work and arguments[2::2] == (0.5, 8)
    assert len(kernel.asked) == 2
    with pytest.raises(RuntimeError, match="cannot be started directly"):
        launch.launch.variant.kernel([], {})


def test_a_launch_takes_its_arguments_by_name_in_any_order_and_from_among_others():
    kernel = Kernel()
    x, y, work = (torch.ones(2, 16, dtype=torch.float16) for _ in range(3))
    launch = launch_of(kernel).bind(1, work_ptr=work)
    launch({"y_ptr": y, "z_ptr": None, "work_ptr": y, "x_ptr": x})
    ((_, arguments),) = calls_of(kernel)
    assert arguments[0] is x and arguments[1] is work and arguments[3] is y


@pytest.mark.parametrize("names", [["x_ptr"], ["x_ptr", "y_ptr"]])
def test_an_argument_that_is_missing_is_an_error(names):
    kernel, x = Kernel(), torch.ones(2, 16, dtype=torch.float16)
    others = {"work_ptr": x, **{name: x for name in ("x_ptr", "y_ptr") if name not in names}}
    launch = Launch(variant(kernel), {"scale": 0.5, **others}, dict.fromkeys(names, x), {}).bind(1)
    with pytest.raises(KeyError, match=names[-1]):
        launch({name: x for name in names[:-1]})
    launch(dict.fromkeys(names, x))
    assert len(calls_of(kernel)) == 1


def test_all_arguments_may_be_given_at_each_start():
    kernel, x = Kernel(), torch.ones(2, 16, dtype=torch.float16)
    launch = Launch.of_all_arguments(kernel, GPU, num_warps=4, num_stages=2)
    for programs, scale in ((3, 0.5), (4, 0.25)):
        launch.start(programs, x, None, scale, x, 8)
    assert [(programs, *arguments[1:3]) for programs, arguments in calls_of(kernel)] == [
        (3, None, 0.5),
        (4, None, 0.25),
    ]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("SIZE", {"SIZE": 16}),
        ("x_ptr", {"x_ptr": torch.ones(2, 16)}),
        ("x_ptr", {"x_ptr": None}),
        ("x_ptr", {"x_ptr": torch.ones(64, dtype=torch.float16)[1:]}),
        ("work_ptr", {"work_ptr": torch.ones(4)}),
        ("scale", {"scale": 1}),
    ],
)
def test_without_a_gpu_starts_that_would_be_specialised_apart_are_refused(name, other, monkeypatch):
    """Started directly, the kernel would run as it was compiled for the first start."""
    kernel, first = Kernel(), {"x_ptr": torch.ones(64, dtype=torch.float16), "work_ptr": None, "scale": 3, "SIZE": 8}
    launch = Launch.of_all_arguments(kernel, torch.device("cpu"), num_warps=4, num_stages=2)
    monkeypatch.setattr(Variant, "prepare", lambda *given: None)
    monkeypatch.setattr(Variant, "launch", lambda *given: None)

    def start(given):
        launch.start(1, *(given.get(each, None) for each in kernel.arg_names))

    start(first)
    start(first | {"x_ptr": torch.zeros(48, dtype=torch.float16), "scale": 5})
    with pytest.raises(RuntimeError, match=f"{name} of kernel must be alike in all starts of a launch; got .*at first"):
        start(first | other)


def test_what_is_compiled_before_its_launch_is_not_compiled_again():
    kernel, x = Kernel(), torch.ones(2, 16, dtype=torch.float16)
    launch = launch_of(kernel).bind(1, work_ptr=x)
    launch.compile()
    ((arguments, _),) = kernel.warmed
    assert arguments[0].is_meta and arguments[1] is x and arguments[3].is_meta
    launch(named(x, x))
    assert len(kernel.warmed) == len(kernel.loaded) == len(calls_of(kernel)) == 1


def sequence_of(count):
    kernels = [Kernel() for _ in range(count)]
    x = torch.ones(2, 16, dtype=torch.float16)
    launches = [launch_of(each).bind(number, work_ptr=x) for number, each in enumerate(kernels)]
    return kernels, LaunchSequence(*launches, None), named(x, x)


def test_a_repeated_sequence_starts_its_kernels_by_one_call():
    kernels, sequence, given = sequence_of(3)
    sequence(given)
    assert not together
    sequence(given)
    assert together == [3] and [len(calls_of(each)) for each in kernels] == [2, 2, 2]
    assert [programs for _, programs, _ in calls] == [0, 1, 2] * 2
    with through_triton():
        sequence(given)
    assert together == [3] and [len(each.asked) for each in kernels] == [1, 1, 1]


def test_a_sequence_of_which_triton_launches_one_kernel_starts_each_alone(monkeypatch):
    kernels, sequence, given = sequence_of(2)
    monkeypatch.setattr(launcher, "loaded", lambda compiled, device: None if compiled is kernels[1] else compiled)
    sequence(given), sequence(given)
    assert together == [1] and len(calls_of(kernels[0])) == len(kernels[1].asked) == 2


@pytest.mark.parametrize("alone", [True, False])
def test_a_thread_without_a_context_gets_one_and_other_failures_are_told(monkeypatch, alone):
    chosen, names = [], []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    kernels, sequence, given = sequence_of(3)
    sequence(given)
    calls.clear()
    one = Launch.of_all_arguments(kernels[0], GPU, num_warps=4, num_stages=2)
    arguments = [given["x_ptr"], given["x_ptr"], 0.5, given["y_ptr"], 8]

    def run():
        one.start(3, *arguments) if alone else sequence(given)

    run()
    calls.clear()
    results[:] = [0, 201] if alone else [0, 0, 0, 201, 0]
    run()
    # Without a context: the kernel once more; in a sequence, the second one and what follows.
    tried = [kernels.index(kernel) for kernel, _, _ in calls]
    assert chosen == [GPU] and tried == ([0, 0] if alone else [0, 1, 1, 2])

    def name_of(result, text):
        names.append(result)
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0

    monkeypatch.setattr(cuda_driver, "cuda_driver", lambda: SimpleNamespace(cuGetErrorName=name_of))
    kernels[2].__name__ = "the_third"
    kernels[0].__name__ = "the_first"
    for failing, name in (
        [([1], "first"), ([1, 201], "first")] if alone else [([1, 0, 0], "third"), ([1, 201, 0, 0], "third")]
    ):
        results[:] = failing
        with pytest.raises(RuntimeError, match=f"refused to start the_{name}: CUDA_ERROR_INVALID_VALUE"):
            run()
    assert names == [1, 1]


def test_the_work_of_a_launch_lives_as_long_as_it():
    work = torch.ones(3)
    alive = weakref.ref(work)
    launch = launch_of(Kernel()).bind(1, work_ptr=work)
    del work
    assert alive() is not None
    del launch
    assert alive() is None


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_left_to_triton(name):
    kernel, x = Kernel(), torch.ones(2, 16, dtype=torch.float16)
    launch = launch_of(kernel).bind(1, work_ptr=x)
    launch(named(x, x))
    hooks = getattr(knobs.runtime, name)

    def hook(*arguments):
        raise AssertionError("Triton calls it, not we")

    hooks.add(hook)
    try:
        launch(named(x, x))
    finally:
        hooks.remove(hook)
    launch(named(x, x))
    assert len(kernel.asked) == 1 and kernel.asked[0][1][0] is x and len(calls_of(kernel)) == 2


def test_a_version_that_is_not_known_is_left_to_triton(monkeypatch):
    monkeypatch.setattr(launcher, "is_measured", lambda version: False)
    kernel, x = Kernel(), torch.ones(2, 16, dtype=torch.float16)
    launch = launch_of(kernel).bind(1, work_ptr=x)
    launch(named(x, x)), launch(named(x, x))
    assert len(kernel.asked) == 2 and kernel.loaded == ["by Triton"] and not calls


def test_the_benchmark_of_calls_can_leave_all_to_triton():
    kernel, x = Kernel(), torch.ones(2, 16, dtype=torch.float16)
    launch = launch_of(kernel).bind(1, work_ptr=x)
    launch(named(x, x))
    with through_triton():
        launch(named(x, x))
    launch(named(x, x))
    assert len(kernel.asked) == 1 and len(calls_of(kernel)) == 2


def test_another_current_gpu_is_left_to_triton(monkeypatch):
    kernel, x = Kernel(), torch.ones(2, 16, dtype=torch.float16)
    launch = launch_of(kernel).bind(1, work_ptr=x)
    launch(named(x, x))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    launch(named(x, x))
    assert len(kernel.asked) == len(calls_of(kernel)) == 1


def test_registers_are_limited_where_a_limit_is_given():
    assert "maxnreg" not in variant(Kernel()).options
    assert variant(Kernel(), registers=168).options["maxnreg"] == 168


def test_arguments_must_be_those_of_the_kernel():
    with pytest.raises(TypeError, match=r"kernel lacks \['scale'\] and does not know \['size'\]"):
        Launch(variant(Kernel()), {"work_ptr": None, "size": 1}, {"x_ptr": None, "y_ptr": None}, {})


def test_what_is_described_is_a_descriptor_to_the_compiler_and_when_a_start_is_prepared():
    kernel = Kernel()
    x = torch.ones(2, 16, dtype=torch.float16)
    launch = launch_of(kernel, y_ptr=Describe(x, [2, 16], [16, 1], [1, 16])).bind(1, work_ptr=x)
    first, second = (torch.zeros(2, 16, dtype=torch.float16) for _ in range(2))
    launch(named(x, first)), launch(named(x, second))
    ((to_compile, _),), start = kernel.warmed, made[0]
    for arguments in (to_compile, start.arguments):
        described = arguments[3]
        assert isinstance(described, TensorDescriptor) and described.base is first
        assert (described.shape, described.strides, described.block_shape) == ([2, 16], [16, 1], [1, 16])
    assert [arguments[3] is y for (_, arguments), y in zip(calls_of(kernel), (first, second))] == [True, True]


def test_descriptors_are_checked_when_they_are_prepared():
    with pytest.raises(AssertionError, match="contiguous"):
        Describe(torch.ones(2, 16), [2, 16], [16, 2], [1, 16])


def test_what_is_launched_while_it_is_compiled_waits_for_that():
    kernel, x = Kernel(), torch.ones(2, 16, dtype=torch.float16)
    launch = launch_of(kernel).bind(1, work_ptr=x)
    compiling = Future()
    compiling.set_exception(ValueError("does not compile"))
    launch.launch.variant.compiling = compiling
    with pytest.raises(ValueError, match="does not compile"):
        launch(named(x, x))
    assert not kernel.warmed and not calls


def test_a_kernel_is_not_loaded_while_a_graph_is_recorded(monkeypatch):
    kernel, x = Kernel(), torch.ones(2, 16, dtype=torch.float16)
    launch = launch_of(kernel).bind(1, work_ptr=x)
    monkeypatch.setattr(streams, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="before the capture"):
        launch(named(x, x))
    monkeypatch.setattr(streams, "is_capturing", lambda device: False)
    launch(named(x, x))
    monkeypatch.setattr(streams, "is_capturing", lambda device: True)
    launch(named(x, x))
    assert len(kernel.warmed) == 1 and len(calls_of(kernel)) == 2


def test_kernels_that_are_new_are_compiled_side_by_side():
    launches = [launch_of(Kernel()).bind(1, work_ptr=torch.ones(1)) for _ in range(3)]
    variants = [launch.launch.variant for launch in launches]
    variants[0].prepare(launches[0]._example())
    with mock.patch.object(BoundLaunch, "compile") as compile_:
        compile_ahead.compile_side_by_side([*launches, launches[1]])
        for variant in variants[1:]:
            variant.compiling.result()
    assert compile_.call_count == 2 and variants[0].compiling is None


def test_one_new_kernel_is_left_to_its_launch_unless_there_is_other_work_meanwhile():
    launch = launch_of(Kernel()).bind(1, work_ptr=torch.ones(1))
    compile_ahead.compile_side_by_side([launch])
    assert launch.launch.variant.compiling is None
    compile_ahead.compile_side_by_side([launch], fewest=1)
    launch.launch.variant.compiling.result()
    assert len(launch.launch.variant.function.warmed) == 1


def test_kernels_that_follow_one_another_are_compiled_at_once_before_the_first_starts():
    kernels, x = [Kernel() for _ in range(3)], torch.ones(2, 16, dtype=torch.float16)
    launches = [Launch.of_all_arguments(each, GPU, num_warps=4, num_stages=2) for each in kernels]
    all_begun, arguments = threading.Barrier(3, timeout=60), (x, None, 0.5, x, 8)

    def warmup(kernel, *given, **options):
        all_begun.wait()
        return Kernel.warmup(kernel, *given, **options)

    for kernel in kernels:
        kernel.warmup = partial(warmup, kernel)
    rehearsals = []

    def rehearse(stand_ins):
        rehearsals.append(len(stand_ins))
        for each in stand_ins:
            each.start(7, *arguments)

    for _ in range(2):
        compile_ahead.compile_rehearsed(launches, rehearse)
        assert not calls or len(calls) == 3
        for each in launches:
            each.start(7, *arguments)
    assert rehearsals == [3] and [len(each.warmed) for each in kernels] == [1, 1, 1]
    assert [len(calls_of(each)) for each in kernels] == [2, 2, 2]


def test_what_a_graph_records_is_not_compiled_meanwhile(monkeypatch):
    monkeypatch.setattr(streams, "is_capturing", lambda device: True)
    launch = Launch.of_all_arguments(Kernel(), GPU, num_warps=4, num_stages=2)
    with pytest.raises(RuntimeError, match="graph"):
        compile_ahead.compile_rehearsed([launch], lambda stand_ins: pytest.fail("it was rehearsed"))


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
