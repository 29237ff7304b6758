import ctypes
import struct
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from triton.runtime import driver

from sparseflash.backends.triton import direct_start, launcher, native
from sparseflash.backends.triton.direct_start import DESCRIPTOR, Parameter, are_declared, parameters_of

CODES = {"i1": "B", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u32": "I", "fp32": "f", "fp64": "d", "*bf16": "Q"}
PTX_TYPES = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 128: "b8"}
LAUNCH = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]


class Driver:
    """Reads the parameters of a launch at their addresses, as a GPU."""

    def __init__(self, monkeypatch, parameters=()):
        self.parameters, self.launches, self.results, self.encoded, self.replaced = parameters, [], [], [], []
        self.resident = []
        # As C sees them; kept alive here.
        self.functions = (
            ctypes.CFUNCTYPE(ctypes.c_int, *LAUNCH, ctypes.c_void_p)(self.launch),
            ctypes.CFUNCTYPE(ctypes.c_int, *LAUNCH)(self.launch_resident),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self.replace),
        )
        addresses = direct_start.Driver(*(ctypes.cast(each, ctypes.c_void_p).value for each in self.functions))
        monkeypatch.setattr(direct_start.Driver, "of_this_machine", lambda: addresses)
        monkeypatch.setattr(direct_start, "cuda_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=self.encode))

    def launch(self, *arguments):
        *others, extra = arguments
        assert extra is None
        return self.started(*others)

    def launch_resident(self, *arguments):
        self.resident.append(len(self.launches))
        return self.started(*arguments)

    def started(self, function, *rest):
        *grid, stream, addresses = rest
        assert function == 99 and stream == 1234
        values = []
        for parameter, address in zip(self.parameters, addresses):
            size = 128 if parameter.code == DESCRIPTOR else struct.calcsize(parameter.code)
            content = ctypes.string_at(address, size)
            values.append(content if parameter.code == DESCRIPTOR else struct.unpack(parameter.code, content)[0])
            assert parameter.code != DESCRIPTOR or address % 64 == 0
        count = len(self.parameters)
        assert [ctypes.string_at(address, 8) for address in addresses[count : count + 2]] == [bytes(8)] * 2
        self.launches.append((tuple(grid), values))
        return self.results.pop() if self.results else 0

    def replace(self, descriptor, address):
        ctypes.memmove(descriptor, struct.pack("Q", address or 0), 8)
        self.replaced.append(address)
        return 0

    def encode(self, descriptor, kind, rank, address, sizes, strides, box, *rest):
        assert descriptor.value % 64 == 0
        ctypes.memmove(descriptor.value + 8, b"made here", 9)
        self.encoded.append((address.value, list(sizes), list(strides)[: rank - 1], list(box)))
        return 0


def kernel_of(parameters, arguments, given, of=None):
    names = {f"x{index}": index for index in given}
    return direct_start.kernel_of(99, of or metadata(), parameters, arguments, names)


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
        made = kernel_of(parameters, first, given_by_calls)
        for bound in range(len(given_by_calls) + 1):
            for programs, given_now in ((5, first), (6, second), (7, first)):
                arguments = [given_now[i] if i in given_by_calls else first[i] for i in range(len(first))]
                values = tuple(given_now[i] for i in given_by_calls)
                named = {f"x{i}": given_now[i] for i in given_by_calls[bound:]} | {"other": None}
                with_some = made.bound(programs, values[:bound])
                assert made.start(programs, values, 1234) is None
                assert with_some.start(programs, values[bound:], 1234) is None
                assert native.module().start((with_some,), named, 1234) is None
                for _ in range(3):
                    grid, read = gpu.launches.pop()
                    assert grid == (programs, 1, 1, 128, 1, 1, 512)
                    assert read == expected(parameters, arguments)


def test_kernels_start_one_after_another_and_each_takes_its_arguments_by_name(monkeypatch):
    parameters = parameters_of({"x": "i32", "y": "*fp32"}, ["x", "y"])
    gpu, x = Driver(monkeypatch, parameters), torch.empty(3)
    kernels = [
        direct_start.kernel_of(99, metadata(resident=n == 1), parameters, (n, x), {f"n{n}": 0, "y": 1}).bound(n + 1, ())
        for n in range(4)
    ]
    assert native.module().start(tuple(kernels), {f"n{n}": 10 + n for n in range(4)} | {"y": x}, 1234) is None
    assert [(grid[0], values) for grid, values in gpu.launches] == [(n + 1, [10 + n, x.data_ptr()]) for n in range(4)]
    assert gpu.resident == [1]
    with pytest.raises(KeyError, match="n3"):
        native.module().start((kernels[3],), {"y": x}, 1234)
    gpu.results = [7, 0, 0]
    assert native.module().start(tuple(kernels), {f"n{n}": n for n in range(4)} | {"y": x}, 1234) == (2, 7)


def test_what_calls_give_stands_in_tuples_of_tuples_at_most(monkeypatch):
    parameters = parameters_of({"x": (("i32", ("i32",)),)}, ["x"])
    assert [each.item for each in parameters] == [(0, 0), (0, 1, 0)]
    values = [((1, (2,)),)]
    Driver(monkeypatch)
    kernel_of(parameters, values, [])  # what no call gives may stand anywhere
    with pytest.raises(RuntimeError, match="must be tensors, tuples of them, or tuples of those"):
        kernel_of(parameters, values, [0])


def test_a_descriptor_is_made_once_and_pointed_to_the_tensor_of_each_call(monkeypatch):
    names = ["a", "described", "b"]
    parameters = parameters_of({"a": "i32", "described": "tensordesc<bf16[1, 1, 64, 16]>", "b": "*bf16"}, names)
    assert [each.code for each in parameters] == ["i", DESCRIPTOR, *"iiiiqqqq", "Q"]
    gpu = Driver(monkeypatch, parameters)
    x, y, z = (torch.empty(2, 3, 64, 16, dtype=torch.bfloat16) for _ in range(3))
    describe = launcher.Describe(x, x.shape, x.stride(), (1, 1, 64, 16))
    box = {"block_size": [1, 1, 64, 16], "swizzle": 1}
    kernel = kernel_of(parameters, [1, describe(x), y], [1, 2], of=metadata([box]))
    ((address, sizes, strides, boxes),) = gpu.encoded
    assert (address, sizes, boxes) == (x.data_ptr(), [16, 64, 3, 2], [16, 64, 1, 1])
    assert strides == [2 * n for n in (16, 64 * 16, 3 * 64 * 16)]
    for tensors in ((x, y), (z, x)):
        kernel.start(3, tensors, 1234)
        assert gpu.replaced.pop() == tensors[0].data_ptr()
        _, (a, descriptor, *sizes, b) = gpu.launches.pop()
        assert descriptor == struct.pack("Q", tensors[0].data_ptr()) + b"made here".ljust(120, b"\0")
        assert [a, *sizes, b] == [1, *x.shape, *x.stride(), tensors[1].data_ptr()]


def test_programs_that_wait_for_one_another_are_started_together(monkeypatch):
    driver = Driver(monkeypatch, parameters_of({"x": "i32"}, ["x"]))
    kernel_of(driver.parameters, [1], [0], of=metadata(resident=True)).start(132, [5], 1234)
    assert driver.launches == [((132, 1, 1, 128, 1, 1, 512), [5])] and driver.resident == [0]


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
