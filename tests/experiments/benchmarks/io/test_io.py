from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from experiments.benchmarks import io, timing
from experiments.benchmarks.harness import Bench
from experiments.benchmarks.io import (
    BUTTERFLY,
    DENSE,
    STANDARD,
    Case,
    app,
    calls_of,
    cost,
    every_density,
    largest_difference,
)
from experiments.measurements import Run, read
from tests.compiling.uninterpreted import python

CPU = torch.device("cpu")
SMALL = Case(DENSE, None, 2, 3, 64, 16, 16, "float32")


def test_ncu_runs_the_case(monkeypatch):
    given = []

    def ncu(command, **options):
        given.extend(command[command.index("one") :])
        return SimpleNamespace(returncode=1, stderr="failed\n")

    monkeypatch.setattr(io.shutil, "which", lambda name: "ncu")
    monkeypatch.setattr(io.subprocess, "run", ncu)
    with pytest.raises(io.NoCountersError, match="ncu failed: failed"):
        io.counted(SMALL, "both")
    made = []
    monkeypatch.setattr(io, "calls_of", lambda case, device: made.append(case))
    done = CliRunner().invoke(app, given)
    assert made == [SMALL] and isinstance(done.exception, TypeError)  # of None


def test_every_density_is_there_once_densest_first():
    cases = every_density(SMALL)
    assert [case.kind for case in cases] == [STANDARD, DENSE] + [BUTTERFLY] * 3
    assert [case.mask().density for case in cases] == [1.0, 1.0, 0.75, 0.5, 0.25]


def test_standard_attention_by_the_model():
    n, d, heads, e = 64, 16, 6, 4
    found = cost(replace(SMALL, kind=STANDARD))
    assert found.forward_flops == heads * 2 * (n * n * d) * 2
    assert found.backward_flops == heads * 2 * (n * n * d) * 4
    matrices, tensors = e * n * n, e * n * d
    assert found.forward_bytes == heads * (4 * matrices + 4 * tensors)
    # dV: P, dO, dV. dP: dO, V, dP. dS: P, dP, dS. dQ: dS, K, dQ. dK: dS, Q, dK.
    products = [(1, 2), (1, 2), (3, 0), (1, 2), (1, 2)]
    assert found.backward_bytes == heads * sum(m * matrices + t * tensors for m, t in products)


@pytest.mark.parametrize("factors", [0, 1, 3])
def test_ours_backward_by_the_model_is_what_the_programs_read(factors):
    case = Case(BUTTERFLY, factors, 1, 2, 512, 32, 64)
    layout = case.mask().to_dense()[0, 0].view(8, 64, 8, 64)[:, 0, :, 0]
    n, d, e, m = 512, 32, 2, 64
    read = 0
    for row in range(8):
        read += 2 * e * m * d + e * m * d + 8 * m
        read += int(layout[row].sum()) * 2 * e * m * d
    for column in range(8):
        read += 4 * e * m * d
        read += int(layout[:, column].sum()) * (2 * e * m * d + 8 * m)
    read += 2 * e * n * d + 12 * n
    assert cost(case).backward_bytes == 2 * read


def test_a_fused_backward_by_the_model_is_what_its_programs_read():
    case = Case(BUTTERFLY, 2, 1, 2, 1024, 64, 128)
    kernels = io.Kernels("hopper", "hopper", 128, 128, fused=True)
    layout = case.mask().to_dense()[0, 0].view(8, 128, 8, 128)[:, 0, :, 0]
    n, d, e, m = 1024, 64, 2, 128
    moved = 2 * e * n * d + 12 * n
    for column in range(8):
        moved += 4 * e * m * d
        for _ in range(int(layout[:, column].sum())):
            moved += 2 * e * m * d + 8 * m
            moved += 2 * 4 * m * d
    moved += 4 * n * d + e * n * d
    assert cost(case, kernels).backward_bytes == 2 * moved


def test_the_kernels_that_run_on_a_hopper_gpu_are_known():
    program = """
from dataclasses import astuple, replace
from experiments.benchmarks.io import BUTTERFLY, DENSE, STANDARD, Case, Kernels, cost, kernels_of
for case in (
    Case(DENSE, None, 64, 16, 1024, 64, 64), Case(BUTTERFLY, 3, 64, 16, 1024, 64, 128),
    Case(BUTTERFLY, 4, 64, 16, 1024, 64, 64), Case(BUTTERFLY, 3, 1, 8, 16_384, 32, 128),
):
    found = kernels_of(case, (9, 0))
    print(found.names("forward"), found.names("both"), *astuple(found)[2:])
    assert cost(case, found).flops == cost(case).flops
    assert kernels_of(case, None) == kernels_of(replace(case, kind=STANDARD), (9, 0)) == Kernels()
"""
    done = python("-c", program)  # where Triton compiles
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "hopper hopper 128 128 True",
        "hopper hopper 128 128 True",
        "portable portable 64 64 False",
        "portable portable, hopper 64 128 True",
    ]


def test_ours_and_standard_attention_agree():
    assert largest_difference(SMALL, CPU) < 1e-5
    sparse = calls_of(replace(SMALL, kind=BUTTERFLY, factors=0), CPU)
    out, gradients = sparse["forward"](), sparse["both"]()
    assert not out.requires_grad and {x.shape for x in gradients} == {out.shape} and len(gradients) == 3


RAW = """==PROF== Connected to process 1
"ID","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_sectors_op_read.sum","lts__t_sectors_op_write.sum"
"","byte","byte","sector","sector"
"0","1,000","200","40","3"
"1","24","0","1","0"
"""


def test_the_counters_are_summed_over_kernels():
    found = io.parse(RAW)
    assert found.hbm == 1224 and found.l2 == 32 * 44


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==PROF== nothing\n", "saw no kernel"),
        (RAW.replace("dram__bytes_read.sum", "other.sum"), "does not count dram__bytes_read.sum"),
        (RAW.replace('"byte"', '"Kbyte"'), "counts in Kbyte"),
    ],
)
def test_what_ncu_cannot_count_has_a_reason(text, message):
    with pytest.raises(io.NoCountersError, match=message):
        io.parse(text)


@pytest.fixture
def bench(tmp_path):
    return Bench("io", Run("H200", "", {}, "", "", ""), tmp_path, CPU, rounds=1)


def test_without_ncu_the_record_says_so(monkeypatch, bench):
    monkeypatch.setattr(io.shutil, "which", lambda name: None)
    io.count(bench, "small", SMALL, counters=True)
    *_, found = bench.measurements
    assert (found.name, found.failure) == ("io/small/hbm-bytes/forward/dense", "ncu is not installed")


def test_counted_bytes_are_recorded(monkeypatch, bench):
    monkeypatch.setattr(io, "counted", lambda case, which: io.Counted(2e9, 3e9))
    io.count(bench, "small", SMALL, counters=True)
    found = {each.name.removeprefix("io/small/"): (each.value, each.unit) for each in bench.measurements}
    assert found == {
        "modelled-bytes/forward/dense": (cost(SMALL).forward_bytes / 1e9, "GB"),
        "modelled-bytes/both/dense": (cost(SMALL).bytes / 1e9, "GB"),
        **{f"{what}/{which}/dense": (gb, "GB") for what, gb in (("hbm-bytes", 2.0), ("l2-bytes", 3.0))
           for which in ("forward", "both")},
    }  # fmt: skip


def test_a_case_that_fails_is_recorded_with_its_reason(monkeypatch, bench):
    real = io.calls_of

    def without_memory(case, device):
        if case.kind == STANDARD:
            raise torch.OutOfMemoryError("out of memory\nand more")
        return real(case, device)

    monkeypatch.setattr(io, "calls_of", without_memory)
    cases = [replace(SMALL, kind=STANDARD), SMALL]
    bench.time("small/both", {case.way: io.way_of(case, "both", CPU) for case in cases})
    failed, fine = bench.measurements
    assert failed.failure == "out of memory" and fine.value > 0
    assert fine.settings == {"flops": cost(SMALL).flops, "live": 1.0}


def test_the_command(tmp_path):
    arguments = ["table", "--batch", "1", "--heads", "1", "--length", "64", "--dim", "16", "--block", "16"]
    with mock.patch.object(timing, "LAUNCHES_A_ROUND", (1, 1)):
        done = CliRunner().invoke(
            app, [*arguments, "--dtype", "float32", "--device", "cpu", "--out", str(tmp_path / "a.jsonl")]
        )
    assert done.exit_code == 0, done.output
    found = read(tmp_path / "a.jsonl")[1]
    ways = ["standard", "dense", "butterfly-2-factors", "butterfly-1-factor", "butterfly-0-factors"]
    names = [each.name.removeprefix("io/paper/1x64-heads1-d16/") for each in found]
    assert names == [
        "largest-difference/dense",
        *(f"modelled-bytes/{which}/{way}" for way in ways for which in ("forward", "both")),
        *(f"time/{which}/{way}" for which in ("forward", "both") for way in ways),
    ]
    assert all(each.value > 0 for each in found)


def test_a_preset_has_the_sizes_that_are_not_given(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(io, "measure", lambda bench, name, shape, counters: made.append((name, shape)))
    arguments = [
        "table", "--preset", "theorem", "--dim", "32", "--dim", "64", "--device", "cpu", "--out", str(tmp_path),
    ]  # fmt: skip
    done = CliRunner().invoke(app, [*arguments, "--length", "256"])
    assert done.exit_code == 0, done.output
    assert made == [("theorem", Case(DENSE, None, 1, 8, 256, dim, 128)) for dim in (32, 64)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table", "--length", "100"], "must be a multiple of --block"),
        (["table", "--preset", "theorem", "--dtype", "int8"], "--dtype must be from bfloat16, float16, float32"),
        (["table", "--preset", "other"], "--preset must be from paper, theorem; got other"),
    ],
)
def test_options_that_cannot_be_served_are_explained(arguments, message):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
