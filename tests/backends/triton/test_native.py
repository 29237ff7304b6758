"""The compiled module that starts kernels: as safe as Python, whatever it is given, and right."""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.benchmarks.calls import through_triton
from sparseflash import attention, clear_caches, masks, scores
from sparseflash.backends.triton import direct_start, native
from tests.backends.triton.native_fuzz import Driver, draw_once
from tests.drawn.counts import examples_times
from tests.drawn.masks import SEEDS

C = native.module()
needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def kernel_of(driver, contents=b"", parameters=(), values=(), names=()):
    size = len(contents)
    made = 99, driver.launch, driver.replace, False, 1, 32, 0, contents + bytes(16), (*parameters, size, size + 8)
    return C.Kernel(*made, values, names)


def test_this_machine_compiles_it():
    assert native.served_by() == "compiled C" and C is not native.Nothing


@examples_times(4)
@given(st.randoms(use_true_random=False))
def test_it_starts_what_it_is_given_and_refuses_what_is_wrong(draw):
    draw_once(draw, Driver(), C)


@needs_compiler
def test_sanitizers_see_nothing(tmp_path):
    """Beside mistakes of a call, they would see memory that is read after it was freed, and arithmetic without a
    meaning in C.
    """
    libraries = [
        subprocess.run(["gcc", f"-print-file-name=lib{name}.so"], capture_output=True, text=True).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("needs gcc's sanitizers")
    environment = {
        **os.environ, "LD_PRELOAD": " ".join(libraries), "PYTHONMALLOC": "malloc", "TRITON_CACHE_DIR": str(tmp_path),
        "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1", "CC": "gcc",
    }  # fmt: skip
    flags = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.triton.native_fuzz", "1", "300", *flags],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("all drawn\n"), done.stderr[-3000:]


@pytest.mark.parametrize(
    "value",
    [(9, "P", 0, -1, -1), (-1, "i", 0, -1, -1), (0, "P", 1, -1, -1), (0, "P", -1, -1, -1), (0, "z", 0, -1, -1),
     (0, "\0", 0, -1, -1), (0, "é", 0, -1, -1), (0, "D", 0, -1, -1), (0, "P", 0, -2, -1), (0, "P", 0, 0, -2)],
)  # fmt: skip
def test_a_value_outside_of_the_contents_or_of_the_slots_is_refused(value):
    with pytest.raises(ValueError, match=r"values? (must lie|has an unknown)"):
        kernel_of(Driver(), b"", (), (value,), ("x",))


def test_the_last_value_that_lies_in_the_contents_is_taken():
    kernel_of(Driver(), b"", (), ((8, "P", 0, -1, -1),), ("x",))
    with pytest.raises(ValueError, match="in the order of their slots"):
        kernel_of(Driver(), b"", (), ((0, "P", 1, -1, -1), (0, "P", 0, -1, -1)), ("x", "y"))
    with pytest.raises(ValueError, match="a parameter must lie in the contents"):
        kernel_of(Driver(), b"", (9,))


def test_a_call_that_is_wrong_says_so():
    driver = Driver()
    kernel = kernel_of(driver, bytes(8), (0,), ((0, "P", 0, 1, -1),), ("x",))
    for given_now, error, text in (
        ([(None, 3)], TypeError, "must be a tensor; got int"),
        ([(None,)], IndexError, "has 1 items; item 1 is read"),
        ([torch.zeros(3)], TypeError, "must be a tuple; got Tensor"),
        ([], IndexError, "has 0 items"),
        ({"y": 1}, KeyError, "x"),
    ):
        with pytest.raises(error, match=text):
            kernel.start(1, given_now, 1234)
    number = kernel_of(driver, bytes(8), (0,), ((0, "i", 0, -1, -1),), ("x",))
    with pytest.raises(OverflowError, match=f"must fit into 4 bytes; got {2**31}"):
        number.start(1, [2**31], 1234)
    with pytest.raises(ValueError, match="at most 16 kernels; got 17"):
        C.start((kernel,) * 17, {}, 1234)
    assert not driver.seen


def test_many_kernels_of_many_parameters_start_together():
    driver, count = Driver(), 400
    driver.sizes = [8] * count
    values = tuple((8 * n, "q", n, -1, -1) for n in range(count))
    kernel = kernel_of(driver, bytes(8 * count), tuple(range(0, 8 * count, 8)), values, tuple(map(str, range(count))))
    assert C.start((kernel,) * 16, {str(n): n**2 for n in range(count)}, 1234) is None
    assert len(driver.seen) == 16
    assert all(found[-1] == [(n**2).to_bytes(8, "little") for n in range(count)] for found in driver.seen)


def resident_kib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024


def test_a_hundred_thousand_calls_keep_nothing():
    # A C function that returns its first argument, here the kernel's handle: 0, as a driver that starts it.
    nothing = ctypes.cast(ctypes.CDLL(None).toupper, ctypes.c_void_p).value
    x, names = torch.zeros(3), ("x", "y", "z")
    values = (0, "P", 0, -1, -1), (8, "P", 1, 0, 0), (16, "i", 2, -1, -1)
    kernel = C.Kernel(0, nothing, nothing, False, 1, 32, 0, bytes(40), (0, 8, 16, 24, 32), values, names)
    given_now = {"x": x, "y": ((x,),), "z": 7}
    wrong = {**given_now, "y": ((3,),)}
    half = torch.zeros(2, 3, dtype=torch.float16)

    def run(count):
        for _ in range(count):
            assert C.start((kernel, kernel), given_now, 0) is None
            kernel.bound(3, (x, ((x,),))).start(1, (7,), 0)
            C.layouts(x, half)
            C.layouts(x, 3)
            with suppress(TypeError):
                C.start((kernel,), wrong, 0)

    run(1000)
    references, before = [sys.getrefcount(each) for each in (x, names, given_now, half)], resident_kib()
    run(100_000)
    assert [sys.getrefcount(each) for each in (x, names, given_now, half)] == references
    assert resident_kib() - before < 2_000


def test_threads_start_one_kernel_at_once_with_arguments_of_their_own():
    driver = Driver()
    driver.sizes = [8, 8, 8]
    values = tuple((8 * slot, "q", slot, -1, -1) for slot in range(3))
    kernel = kernel_of(driver, bytes(24), (0, 8, 16), values, ("x", "y", "z"))

    def run(number):
        for n in range(200):
            x = 1000 * number + n
            C.start((kernel, kernel), {"x": x, "y": -x, "z": x**2}, number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    [each.start() for each in threads], [each.join() for each in threads]
    assert len(driver.seen) == 8 * 200 * 2
    for *_, stream, found in driver.seen:
        x, y, z = (int.from_bytes(each, "little", signed=True) for each in found)
        assert y == -x and z == x**2 and x // 1000 == (stream or 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_starts_kernels_too():
    source = (
        "import os, torch\n"
        "from tests.backends.triton.test_native import Driver, kernel_of, C\n"
        "driver = Driver(); driver.sizes = [8]\n"
        "kernel = kernel_of(driver, bytes(8), (0,), ((0, 'q', 0, -1, -1),), ('x',))\n"
        "kernel.start(1, (5,), 0)\n"
        "child = os.fork()\n"
        "kernel.start(1, (6,), 0)\n"
        "assert [int.from_bytes(each[-1][0], 'little') for each in driver.seen] == [5, 6]\n"
        "if child == 0: os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "print('both')"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "both\n", done.stderr[-2000:]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=5))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool]))
    x = torch.zeros([n + 1 for n in shape], dtype=dtype)
    for axis, n in enumerate(shape):
        x = x.narrow(axis, draw(st.integers(0, 1)), n)
    x = x.permute(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        x = torch.nn.Parameter(x, requires_grad=False)
    return x


def beside(x):
    memory = torch.zeros(x.untyped_storage().nbytes() // x.element_size() + 1, dtype=x.dtype)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset() + 1)


@given(st.lists(st.lists(tensors(), min_size=1, max_size=2), min_size=1, max_size=3))
def test_layouts_are_equal_where_shapes_strides_dtypes_and_alignment_are(several):
    several += [[beside(x) for x in each] for each in several]
    ours = [C.layouts(*each) for each in several]
    theirs = [[(x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in each] for each in several]
    assert None not in ours
    for a in range(len(several)):
        for b in range(len(several)):
            assert (ours[a] == ours[b]) == (theirs[a] == theirs[b])


def test_what_has_no_memory_of_its_own_or_may_override_operators_has_no_layout():
    class Own(torch.Tensor):
        pass

    x, kept = torch.zeros(2, 3), []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(x)
    without = [
        kept[0], x.to("meta"), x.to_sparse(), torch._neg_view(x), x.as_subclass(Own), [x], None,
        torch.nested.nested_tensor([x], layout=torch.jagged),
    ]  # fmt: skip
    torch.func.vmap(lambda x: without.append(x) or x)(x)
    for each in without:
        assert C.layouts(x, each) is None, type(each)
    assert C.layouts(x, x) is not None


def test_tritons_launcher_starts_kernels_where_nothing_compiles():
    source = (
        "import torch\n"
        "from sparseflash import explain\n"
        "from sparseflash.backends.triton import native\n"
        "assert native.module() is native.Nothing\n"
        "print(native.served_by())\n"
        "q = torch.empty(1, 2, 128, 64, dtype=torch.float16, device='meta')\n"
        "print(explain(q, q, q, capability=(9, 0)))\n"
    )
    environment = {**os.environ, "TRITON_CACHE_DIR": "/nowhere/at/all", "CC": "/no/compiler"}
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    why = "Triton's launcher, because native.c could not be compiled ("
    assert done.stdout.startswith(why) and f"\nkernels are started by {why}" in done.stdout
    assert "kernels are started by Triton's launcher, which takes the host longer at every call: " in done.stderr


def results(mask, change, device="cuda"):
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, 4, 256, 64, generator=g).to(device, torch.bfloat16).requires_grad_(n < 3) for n in range(4)
    )
    found = []
    for _ in range(3):
        out, lse = attention(q, k, v, mask, scores=change, return_lse=True)
        found.append([out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)])
    assert all(torch.equal(a, b) for later in found[1:] for a, b in zip(found[0], later, strict=True))
    return found[0]


CASES = [(None, False), (lambda: masks.causal(256, block=128), False), (lambda: masks.butterfly(256, block=64), False),
         (lambda: masks.causal(256, block=128), True)]  # fmt: skip


def case(of, device="cuda"):
    make, changed = of
    mask = None if make is None else make().to(device)
    return mask, scores.alibi(2.0 ** -torch.arange(1.0, 5, device=device)) if changed else None


@pytest.mark.gpu
@pytest.mark.parametrize("of", CASES, ids=["dense", "causal", "butterfly", "alibi"])
def test_it_gives_the_bits_of_tritons_launcher(of):
    found = []
    for context in (nullcontext(), through_triton()):
        clear_caches()
        with context:
            found.append(results(*case(of)))
    clear_caches()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("of", CASES, ids=["dense", "causal", "butterfly", "alibi"])
def test_a_graph_and_other_streams_give_the_same_bits(of):
    mask, change = case(of)
    want = results(mask, change)
    for _ in range(2):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = results(mask, change)
        stream.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.autograd.set_multithreading_enabled(False):
        g = torch.Generator().manual_seed(0)
        *leaves, dout = (torch.randn(1, 4, 256, 64, generator=g).to("cuda", torch.bfloat16) for _ in range(4))
        leaves = [x.requires_grad_() for x in leaves]
        with torch.cuda.graph(graph):
            out, lse = attention(*leaves, mask, scores=change, return_lse=True)
            got = [out, lse, *torch.autograd.grad(out, leaves, dout)]
    for _ in range(2):
        [x.detach().zero_() for x in got]
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a.detach(), b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("of", CASES, ids=["dense", "causal", "butterfly", "alibi"])
def test_two_gpus_give_the_same_bits_whichever_is_current(of):
    want = results(*case(of, "cuda:0"), "cuda:0")
    for current in (0, 1):
        with torch.cuda.device(current):
            for device in ("cuda:1", "cuda:0"):
                got = results(*case(of, device), device)
                assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))


def test_a_driver_has_addresses_of_its_functions(monkeypatch):
    functions = {"cuLaunchKernel": Driver().functions[0], "cuLaunchCooperativeKernel": Driver().functions[1]}
    library = mock.Mock(**functions, cuTensorMapReplaceAddress=Driver().functions[2])
    monkeypatch.setattr(direct_start, "cuda_driver", lambda: library)
    assert all(direct_start.Driver.of_this_machine()) and len(set(direct_start.Driver.of_this_machine())) == 3


@given(SEEDS)
def test_a_kernel_bound_twice_is_the_kernel_bound_at_once(seed):
    driver = Driver()
    driver.sizes = [8, 8, 8]
    values = tuple((8 * slot, "q", slot, -1, -1) for slot in range(3))
    kernel = kernel_of(driver, bytes(24), (0, 8, 16), values, ("x", "y", "z"))
    given_now = seed % 7, seed % 11, seed % 13
    kernel.bound(2, given_now[:1]).bound(2, given_now[1:2]).start(2, given_now[2:], 5)
    kernel.bound(9, given_now[:2]).start(2, given_now[2:], 5)
    kernel.start(2, given_now, 5)
    assert driver.seen[0] == driver.seen[1] == driver.seen[2]
