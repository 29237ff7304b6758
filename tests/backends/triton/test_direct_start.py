import ctypes
import struct
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from triton.runtime import driver

from sparseflash import cuda_driver
from sparseflash.backends.triton import direct_start, launcher
from sparseflash.backends.triton.direct_start import DESCRIPTOR, DirectStart, Parameter, are_declared, parameters_of

CPU = torch.device("cpu")
CODES = {"i1": "B", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u32": "I", "fp32": "f", "fp64": "d", "*bf16": "Q"}
PTX_TYPES = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 128: "b8"}


class Driver:
    """Reads the parameters of a launch at their addresses, as a GPU."""

    def __init__(self, monkeypatch, parameters):
        self.parameters, self.launches, self.results, self.encoded, self.replaced = parameters, [], [], [], []
        monkeypatch.setattr(direct_start, "_functions", lambda: (self.launch, self.replace))
        monkeypatch.setattr(direct_start, "_launch_of_resident", lambda: self.launch_resident)
        monkeypatch.setattr(direct_start, "cuda_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=self.encode))
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1234, raising=False)

    def launch(self, *arguments):
        *others, extra = arguments
        assert extra is None
        return self.launch_resident(*others)

    def launch_resident(self, function, *rest):
        *grid, stream, addresses = rest
        assert function.value == 99 and stream == 1234
        values = []
        for parameter, address in zip(self.parameters, addresses):
            size = 128 if parameter.code == DESCRIPTOR else struct.calcsize(parameter.code)
            content = ctypes.string_at(address, size)
            values.append(address if parameter.code == DESCRIPTOR else struct.unpack(parameter.code, content)[0])
        scratch = [ctypes.string_at(address, 8) for address in list(addresses)[len(self.parameters) :]]
        assert scratch == [bytes(8)] * 2
        self.launches.append((tuple(grid), values))
        return self.results.pop() if self.results else 0

    def replace(self, descriptor, address):
        self.replaced.append((descriptor, address))

    def encode(self, descriptor, kind, rank, address, sizes, strides, box, *rest):
        assert descriptor.value % 64 == 0
        self.encoded.append((descriptor.value, address.value, list(sizes), list(strides)[: rank - 1], list(box)))
        return 0


def metadata(descriptors=(), resident=False):
    return SimpleNamespace(
        name="some_kernel", num_warps=4, shared=512, tensordesc_meta=list(descriptors), launch_cooperative_grid=resident
    )  # fmt: skip


def number(kind, draw):
    if kind.startswith("*"):
        return torch.empty(3)
    if kind.startswith("fp"):
        return draw(st.floats(width=32, allow_nan=False))
    bits = int(kind[1:])
    low, high = (0, 2**bits - 1) if kind[0] == "u" or bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return draw(st.integers(low, high))


@st.composite
def kernels(draw):
    kinds = st.sampled_from([*CODES, "constexpr"])
    of_tuples = st.sampled_from(["i32", "i64", "fp32", "*bf16", "constexpr"])
    tuples = st.lists(of_tuples, max_size=3).map(tuple)
    in_tuples = st.one_of(tuples, st.lists(tuples | of_tuples, max_size=3).map(tuple))
    signature = draw(st.lists(st.one_of(kinds, in_tuples), max_size=8))

    def value(kind):
        if isinstance(kind, tuple):
            return tuple(map(value, kind))
        return 7 if kind == "constexpr" else number(kind, draw)

    first, second = ([value(kind) for kind in signature] for _ in range(2))
    given_by_calls = draw(st.lists(st.sampled_from(range(len(signature))), unique=True)) if signature else []
    return signature, (first, second), given_by_calls


def expected(parameters, arguments):
    values = []
    for parameter in parameters:
        value = arguments[parameter.argument]
        items = parameter.item if isinstance(parameter.item, tuple) else (parameter.item,)
        for item in items if parameter.item is not None else ():
            value = value[item]
        values.append(value.data_ptr() if isinstance(value, torch.Tensor) else value)
    return values


@given(kernels())
@example((["i32", ("i64", "constexpr", "i32")], ([1, (2, 7, 3)], [4, (5, 7, 6)]), [1]))
@example(([((), ("i64", "i32"), "fp32"), "i32"], ([((), (2, 3), 0.5), 1], [((), (5, 6), 1.5), 4]), [0]))
def test_a_kernel_reads_what_each_call_gives_and_what_was_given_before(kernel):
    signature, (first, second), given_by_calls = kernel
    names = [f"x{i}" for i in range(len(signature))]
    parameters = parameters_of(dict(zip(names, signature)), names)
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = Driver(monkeypatch, parameters)
        start = DirectStart(99, metadata(), parameters, first, given_by_calls, CPU)
        for programs, given_now in ((5, first), (6, second), (7, first)):
            arguments = [given_now[i] if i in given_by_calls else first[i] for i in range(len(first))]
            start(programs, [given_now[i] for i in given_by_calls])
            grid, values = gpu.launches.pop()
            assert grid == (programs, 1, 1, 128, 1, 1, 512)
            assert values == expected(parameters, arguments)


def test_what_calls_give_stands_in_tuples_of_tuples_at_most(monkeypatch):
    parameters = parameters_of({"x": (("i32", ("i32",)),)}, ["x"])
    assert [each.item for each in parameters] == [(0, 0), (0, 1, 0)]
    values = [((1, (2,)),)]
    monkeypatch.setattr(direct_start, "_functions", lambda: (None, None))
    DirectStart(99, metadata(), parameters, values, [], CPU)  # what no call gives may stand anywhere
    with pytest.raises(RuntimeError, match="must be tensors, tuples of them, or tuples of those"):
        DirectStart(99, metadata(), parameters, values, [0], CPU)


def test_a_descriptor_is_made_once_and_pointed_to_the_tensor_of_each_call(monkeypatch):
    names = ["a", "described", "b"]
    parameters = parameters_of({"a": "i32", "described": "tensordesc<bf16[1, 1, 64, 16]>", "b": "*bf16"}, names)
    assert [each.code for each in parameters] == ["i", DESCRIPTOR, *"iiiiqqqq", "Q"]
    gpu = Driver(monkeypatch, parameters)
    x, y, z = (torch.empty(2, 3, 64, 16, dtype=torch.bfloat16) for _ in range(3))
    describe = launcher.Describe(x, x.shape, x.stride(), (1, 1, 64, 16))
    box = {"block_size": [1, 1, 64, 16], "swizzle": 1}
    start = DirectStart(99, metadata([box]), parameters, [1, describe(x), y], [1, 2], CPU)
    ((descriptor, address, sizes, strides, boxes),) = gpu.encoded
    assert (address, sizes, boxes) == (x.data_ptr(), [16, 64, 3, 2], [16, 64, 1, 1])
    assert strides == [2 * n for n in (16, 64 * 16, 3 * 64 * 16)]
    for tensors in ((x, y), (z, x)):
        start(3, tensors)
        assert gpu.replaced.pop() == (descriptor, tensors[0].data_ptr())
        _, values = gpu.launches.pop()
        assert values == [1, descriptor, *x.shape, *x.stride(), tensors[1].data_ptr()]


def test_a_thread_without_a_context_gets_one_and_other_failures_are_told(monkeypatch):
    gpu = Driver(monkeypatch, [])
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    start = DirectStart(99, metadata(), [], [], [], torch.device("cuda", 3))
    gpu.results = [0, 201]  # the last one first
    start(1, [])
    assert chosen == [torch.device("cuda", 3)] and len(gpu.launches) == 2

    def name_of(result, text):
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0

    monkeypatch.setattr(cuda_driver, "cuda_driver", lambda: SimpleNamespace(cuGetErrorName=name_of))
    gpu.results = [1]
    with pytest.raises(RuntimeError, match="some_kernel"):
        start(1, [])


def test_programs_that_wait_for_one_another_are_started_together(monkeypatch):
    driver = Driver(monkeypatch, parameters_of({"x": "i32"}, ["x"]))
    monkeypatch.setattr(driver, "launch", None)
    start = DirectStart(99, metadata(resident=True), driver.parameters, [1], [0], CPU)
    start(132, [5])
    assert driver.launches == [((132, 1, 1, 128, 1, 1, 512), [5])]


def test_a_descriptor_of_gluon_has_the_rank_of_its_box():
    kind = "tensordesc<fp32[64, 128],NVMMASharedLayout(128, 32, 2, False, False, [])>"
    assert [each.code for each in parameters_of({"x": kind}, ["x"])] == [DESCRIPTOR, *"iiqq"]


def test_a_type_that_is_not_known_is_not_started():
    assert parameters_of({"x": "fp8e4nv"}, ["x"]) is None
    assert parameters_of({"x": ("i32", "nvTmaDesc")}, ["x"]) is None


@given(st.lists(st.sampled_from([*"bhiqf", DESCRIPTOR]), max_size=6), st.data())
def test_parameters_of_other_sizes_than_the_code_declares_are_refused(codes, data):
    sizes = [128 if code == DESCRIPTOR else struct.calcsize(code) for code in codes]
    declared = [
        f".param .align 64 .b8 p{i}[128]" if size == 128 else f".param .{PTX_TYPES[size]} p{i}"
        for i, size in enumerate([*sizes, 8, 8])
    ]
    parameters = [Parameter(i, None, code) for i, code in enumerate(codes)]
    assert are_declared(parameters, f".visible .entry f({','.join(declared)})")
    declared.pop(data.draw(st.integers(0, len(declared) - 1)))
    assert not are_declared(parameters, f".visible .entry f({','.join(declared)})")
    assert not are_declared(parameters, "no kernel")


class Utils:
    def __init__(self, most_shared=1000, most_threads=1024):
        self.most_shared, self.most_threads, self.loads = most_shared, most_threads, 0

    def get_device_properties(self, index):
        return {"max_shared_mem": self.most_shared}

    def load_binary(self, name, kernel, shared, index):
        assert (name, kernel, shared) == ("some_kernel", b"code", 512)
        self.loads += 1
        return 1, 70 + index, 128, 0, self.most_threads


class Compiled:
    name, kernel = "some_kernel", b"code"
    metadata = metadata()


def test_a_kernel_is_loaded_once_on_each_gpu_and_only_where_it_fits(monkeypatch):
    utils = Utils()
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=utils))
    kernel = Compiled()
    assert [direct_start.loaded(kernel, torch.device("cuda", index)) for index in (0, 1, 0, 1)] == [70, 71, 70, 71]
    assert utils.loads == 2
    for small in (Utils(most_shared=511), Utils(most_threads=127)):
        monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=small))
        assert direct_start.loaded(Compiled(), torch.device("cuda", 0)) is None
    alive = weakref.ref(kernel)
    del kernel
    assert alive() is None
