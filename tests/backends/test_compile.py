"""The kernels through the real compiler, which needs no GPU: properties that a tuning must not lose unnoticed."""

import json
import os
import re
from contextlib import nullcontext
from functools import cache
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from tests.compiling import ahead as compile_ahead
from tests.compiling.uninterpreted import python
from tests.processes import forked


@cache
def reports(*arguments):
    done = python("-m", "experiments.benchmarks.compile", "show", "--json", *arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(r["direct"] for r in found), found  # otherwise every call pays for Triton's own launcher
    return found


def spills(bytes_spilled, *, by_triton_36):
    is_36 = tuple(map(int, version("triton").split(".")[:2])) < (3, 7)
    return by_triton_36 if is_36 else bytes_spilled


TWO_ARCHITECTURES = ("--arch", "80", "--arch", "90", "--dim", "64")


def test_on_hopper_nothing_is_spilled_or_serialised_at_head_dim_64():
    found = [r for r in reports(*TWO_ARCHITECTURES) if r["arch"] == 90]
    assert [(r["kernel"], r["descriptors"]) for r in found] == [
        (kernel, descriptors) for descriptors in (True, False) for kernel in ("forward", "dq", "dk_dv")
    ]
    for r in found:
        assert r["wgmma"] > 0, r
        assert r["spilled"] <= allowed_spills(r), r
        assert not r["serialised"], r


@pytest.mark.parametrize("more", ["lengths", "dropout"])
def test_nor_where_kernels_do_more(more):
    found = reports("--arch", "90", "--dim", "64", "--with", more)
    assert len(found) == 6
    for r in found:
        assert r["with"] == [more], r
        assert r["wgmma"] > 0 and not r["serialised"], r
        assert r["spilled"] <= spills(252, by_triton_36=220), r


def test_dropout_by_positions_spills_no_more_than_by_places_in_the_call():
    found = reports("--arch", "90", "--dim", "64", "--with", "dropout", "--with", "positions")
    assert len(found) == 6 and all(r["with"] == ["dropout", "positions"] for r in found)
    for r in found:
        assert r["wgmma"] > 0 and not r["serialised"], r
        assert r["spilled"] <= (spills(80, by_triton_36=96) if r["kernel"] == "dk_dv" else 0), r


def test_fp32_in_pieces_feeds_the_asynchronous_instructions_at_head_dim_64():
    found = reports("--arch", "90", "--dim", "64", "--arithmetic", "float32")
    kernels = ["forward", "dq", "dq", "dk_dv"]  # dq twice: it finds delta first
    assert [(r["kernel"], r["descriptors"]) for r in found if r["kernel"] != "pieces"] == [
        (kernel, descriptors) for descriptors in (True, False) for kernel in kernels
    ]
    for r in found:
        if r["kernel"] != "pieces":
            assert r["wgmma"] > 0 and not r["serialised"] and not r["two_layouts"], r
            assert r["spilled"] <= (spills(196, by_triton_36=172) if r["kernel"] == "dk_dv" else 0), r


def test_fp32_that_is_split_where_it_is_multiplied_has_one_layout_too():
    """For keys that few queries read: see choice.py."""
    source = (
        "from experiments.benchmarks.compile.report import compile_all\n"
        "from sparseflash.backends.triton.overrides import override\n"
        "with override(pieces=False):\n"
        "    for r in compile_all(90, 'float32', 64, value_dim=16): print(r.kernel, r.wgmma > 0, r.two_layouts)"
    )
    done = python("-c", source)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [f"{kernel} True False" for kernel in ("forward", "dq", "dq", "dk_dv")]


def test_a_bias_whose_rows_begin_anywhere_leaves_scores_in_the_layout_of_the_products():
    """Otherwise a row is reduced across a warp, by 648 shuffles or more."""
    source = (
        "import torch\n"
        "from experiments.benchmarks.compile import report\n"
        "from experiments.benchmarks.compile.without_gpu import compiling_for\n"
        "from sparseflash import scores\n"
        "from sparseflash.backends.triton.overrides import NEVER_SPLIT, override\n"
        "from sparseflash.scores.change import Scores\n"
        "report.TOKENS = 1000\n"
        "bias = Scores((scores.bias(torch.zeros(1, 2, 1000, 1000, dtype=torch.bfloat16)),))\n"
        "for dim in (32, 64, 128):\n"
        "    with override(splits=NEVER_SPLIT), compiling_for(90, 'forward', assemble=False) as compiled:\n"
        "        report.launch_all(90, 'bfloat16', dim, dim, 128, lengths=False, dropout=False, changes=bias)\n"
        "    print(*(kernel.asm['ptx'].count('shfl.sync') for _, kernel in compiled))"
    )
    done = python("-c", source)
    assert done.returncode == 0, done.stderr
    counts = [int(line) for line in done.stdout.split()]
    assert len(counts) == 3
    # Two loops, each with maximum and sum of two rows a thread over four threads; Triton may add a few.
    assert all(16 <= count <= 20 for count in counts), counts


def test_a_decay_is_fused_by_name_so_that_both_passes_round_it_alike():
    source = (
        "import torch\n"
        "from experiments.benchmarks.compile import report\n"
        "from experiments.benchmarks.compile.without_gpu import compiling_for\n"
        "from sparseflash import scores\n"
        "from sparseflash.scores.change import Scores\n"
        "changes = Scores((scores.alibi(torch.ones(2)),))\n"
        "with compiling_for(90, assemble=False) as compiled:\n"
        "    report.launch_all(90, 'float32', 64, 64, 64, lengths=False, dropout=False, changes=changes)\n"
        "for name, kernel in compiled: print(name, 'math.fma' in kernel.asm['ttir'])"
    )
    done = python("-c", source)
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines())
    assert {name: found[name] for name in found if name in ("forward_kernel", "dq_kernel", "dk_dv_kernel")} == {
        "forward_kernel": "True", "dq_kernel": "True", "dk_dv_kernel": "True",
    }, done.stdout  # fmt: skip


@pytest.mark.parametrize(("arch", "block"), [(90, 32), (120, 128)])
def test_fp32_in_pieces_takes_no_descriptors_where_tiles_come_through_registers(arch, block):
    found = reports("--arch", str(arch), "--block", str(block), "--dim", "64", "--arithmetic", "float32")
    assert {r["kernel"] for r in found} == {"pieces", "forward", "dq", "dk_dv"}
    for r in found:
        assert not r["descriptors"], r
        assert r["spilled"] <= (spills(60, by_triton_36=128) if r["kernel"] == "dq" else 32), r


def allowed_spills(report):
    """Where registers are limited to fit one program more, some bytes may spill outside the loop over full tiles."""
    if report["kernel"] == "dk_dv" and report["descriptors"] and report["registers"] == 168:
        return spills(180, by_triton_36=160)
    return spills(8, by_triton_36=0) if report["kernel"] == "dq" and report["registers"] == 128 else 0


@pytest.mark.parametrize("arithmetic", ["float16", "float32"])
@pytest.mark.parametrize("arch", [80, 86, 120])
def test_other_architectures_have_the_shared_memory_that_is_asked_for(arch, arithmetic):
    found = reports("--arch", str(arch), "--dim", "128", "--arithmetic", arithmetic)
    assert {r["kernel"] for r in found} - {"pieces"} == {"forward", "dk_dv", "dq"}


@pytest.mark.parametrize("arch", [80, 86, 120])
def test_so_do_the_widest_heads_in_full_fp32(arch):
    source = (
        "from experiments.benchmarks.compile.report import launch_all\n"
        "from experiments.benchmarks.compile.without_gpu import compiling_for\n"
        "from sparseflash.backends.triton.direct_start import parameters_of_compiled\n"
        "from sparseflash.backends.triton.overrides import NEVER_SPLIT, override\n"
        "from sparseflash.backends.triton.architecture import architecture_of\n"
        f"for descriptors in {(True, False) if arch >= 90 else (False,)}:\n"
        "    choices = {'descriptors': descriptors, 'splits': NEVER_SPLIT, 'tiling': lambda tilings: tilings[0]}\n"
        f"    with override(**choices), compiling_for({arch}, assemble=False) as compiled:\n"
        f"        launch_all({arch}, 'float32', 256, 256, 128, lengths=False, dropout=False)\n"
        "    for name, kernel in compiled:\n"
        f"        most = architecture_of(divmod({arch}, 10)).shared_memory\n"
        "        assert kernel.metadata.shared <= most, (name, kernel.metadata.shared)\n"
        "        assert parameters_of_compiled(kernel, kernel.src.fn.arg_names) is not None, name\n"
        "    print(sorted({name for name, _ in compiled} - {'pieces_kernel'}))"
    )
    done = python("-c", source)
    assert done.returncode == 0, done.stderr
    found = "['dk_dv_kernel', 'dq_kernel', 'forward_kernel']\n"
    assert done.stdout == found * (2 if arch >= 90 else 1)


@pytest.mark.parametrize(("arch", "served"), [(80, 2), (86, 2), (90, 4)])
def test_the_choice_of_blocks_fits_into_shared_memory(arch, served):
    source = (
        "from unittest import mock\n"
        "import torch\n"
        "from experiments.benchmarks.compile.without_gpu import compiling_for\n"
        "from sparseflash.backends.triton.architecture import architecture_of\n"
        "from sparseflash.masks import fused, select_blocks\n"
        "from sparseflash.masks.fused import block_scores, select\n"
        "def write(scores, begins, stops, index, start): index.fill_(-1)\n"
        "served = 0\n"
        f"with compiling_for({arch}, assemble=False) as compiled, mock.patch.object(fused, '_DEVICES', ['cpu']), (\n"
        "    mock.patch.object(block_scores, 'write_largest', write)), (\n"
        f"    mock.patch.object(select, 'capability_of', lambda device: divmod({arch}, 10))):\n"
        "    for dtype in (torch.float32, torch.bfloat16):\n"
        "        for top_k in (4, 130):\n"
        "            q, k = (torch.zeros(1, 1, n, 256, dtype=dtype) for n in (256, 1024))\n"
        "            select_blocks(q, k, top_k=top_k, span=256, block_q=128)\n"
        f"most = architecture_of(divmod({arch}, 10)).shared_memory\n"
        "assert all(kernel.metadata.shared <= most for _, kernel in compiled), compiled\n"
        "print(len(compiled))"
    )
    done = python("-c", source)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{served}\n"


def test_every_architecture_of_a_run_has_kernels_of_its_own():
    found = reports(*TWO_ARCHITECTURES)
    assert [r["arch"] for r in found] == [80] * 3 + [90] * 6
    assert all((r["wgmma"] > 0) == (r["arch"] == 90) for r in found), found


@pytest.mark.parametrize("arithmetic", ["float16", "float32"])
def test_what_is_compiled_before_its_launch_is_what_is_launched(arithmetic):
    source = (
        "from experiments.benchmarks.compile.report import launch_all\n"
        "from experiments.benchmarks.compile.without_gpu import compiling_for\n"
        "from sparseflash.backends.triton.overrides import always_split, override\n"
        "with override(splits=always_split(1)), compiling_for(90, assemble=False) as compiled:\n"
        f"    launches = launch_all(90, {arithmetic!r}, 32, 32, 128, lengths=True, dropout=True, positions=True)\n"
        "    ahead = [launch.compiled() for launch in launches]\n"
        "launched = {kernel.hash for name, kernel in compiled if name != 'pieces_kernel'}\n"
        "print(len(launches), launched == {kernel.hash for kernel in ahead})"
    )
    done = python("-c", source)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{8 if arithmetic == 'float32' else 6} True\n"


def test_padding_compiles_too():
    assert len(reports("--arch", "90", "--dim", "80", "--with", "lengths")) == 6


@pytest.mark.parametrize(("dims", "arithmetic"), [((64, 16), "bfloat16"), ((64, 16), "tf32"), ((32, 128), "float16")])
def test_values_of_another_head_dim_are_laid_out_as_the_rest_is(dims, arithmetic):
    # ptxas 12.8, in Triton 3.6 and 3.7, miscompiles some kernels that read one address in two layouts.
    found = reports("--arch", "90", "--dim", str(dims[0]), "--value-dim", str(dims[1]), "--arithmetic", arithmetic)
    assert {(r["kernel"], r["descriptors"]) for r in found} == {
        (kernel, descriptors) for kernel in ("forward", "dq", "dk_dv") for descriptors in (True, False)
    }
    assert all((r["dim"], r["value_dim"]) == dims for r in found)
    assert all(r["wgmma"] > 0 and not r["two_layouts"] for r in found), found


def test_in_chunks_nothing_is_spilled_at_head_dim_64_either():
    found = reports("--arch", "90", "--dim", "64", "--with", "split")
    passes = ["forward", "combine_rows", "dq", "combine_gradients", "dk_dv", "combine_gradients"]
    assert [r["kernel"] for r in found] == passes * 2
    assert all(r["with"] == ["split"] and r["spilled"] <= allowed_spills(r) and not r["serialised"] for r in found)


@pytest.mark.parametrize("block", [16, 32])
def test_gathered_tiles_spill_nothing_and_feed_the_asynchronous_instructions_at_head_dim_64(block):
    found = reports("--arch", "90", "--dim", "64", "--block", str(block), "--with", "gathered")
    assert [r["kernel"] for r in found] == ["forward", "dq", "dk_dv"]
    for r in found:
        assert r["with"] == ["gathered"] and not r["descriptors"], r
        assert r["wgmma"] > 0 and r["spilled"] == 0 and not r["serialised"], r


def test_the_kernels_of_gpu_tests_are_compiled_where_there_is_no_gpu(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--compile-ahead"]
    chosen = ["tests/backends/test_exactness.py", "-k", "other_architectures and 32 and 8 and half"]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = forked.python(*words, *chosen, environment=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r"^[1-9]\d* passed, \d+ deselected", done.stdout, re.MULTILINE), done.stdout
    assert {path.stem for path in tmp_path.rglob("*.cubin")} == {"forward_kernel", "dq_kernel", "dk_dv_kernel"}


@pytest.mark.parametrize(
    ("shared", "constant", "message"),
    [
        (compile_ahead.SHARED_MEMORY, "4611686293305294850", None),
        (compile_ahead.SHARED_MEMORY + 1, "4611686293305294850", "asks for 232449 bytes"),
        (1, "-4611685949707911136", "two layouts"),
    ],
)
def test_what_is_compiled_ahead_is_looked_at(monkeypatch, shared, constant, message):
    monkeypatch.setattr(compile_ahead, "_checked", set())
    ptx = f"or.b64 %rd5, %rd1, 4611686293305294848;\nadd.s64 %rd6, %rd1, {constant};"
    kernel = SimpleNamespace(hash="a", metadata=SimpleNamespace(shared=shared), asm={"ptx": ptx})
    with nullcontext() if message is None else pytest.raises(AssertionError, match=message):
        compile_ahead.inspect("forward_kernel", kernel)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arithmetic", "foo"], "--arithmetic must be from bfloat16, float16, tf32, float32; got foo."),
        (["--block", "100"], "--block must be from 16, 32, 64, 128, 256; got 100."),
        (["--with", "gathered"], "--with gathered needs a --block of 16 or 32; got 128."),
        (["--with", "positions"], "--with positions needs --with dropout."),
        (["--with", "foo"], "--with must be from lengths, dropout, positions, split, gathered; got foo."),
    ],
)
def test_options_that_cannot_be_served_are_explained(words, message):
    done = python("-m", "experiments.benchmarks.compile", "show", *words)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
