"""The table of operations, bytes and time: the model against a count by hand, the counters' parser, the command."""

import csv
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from experiments.benchmarks.io import counters, measuring, report
from experiments.benchmarks.io.__main__ import app
from experiments.benchmarks.io.cases import BUTTERFLY, DENSE, STANDARD, Case, every_density, of_words
from experiments.benchmarks.io.implementations import calls_of
from experiments.benchmarks.io.measuring import Row, largest_difference, measure
from experiments.benchmarks.io.model import cost

CPU = torch.device("cpu")
SMALL = Case(DENSE, None, 2, 3, 64, 16, 16, torch.float32)


@pytest.mark.parametrize("case", every_density(SMALL), ids=lambda case: case.name)
def test_a_case_survives_the_command_line(case):
    assert of_words(case.words()) == case


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
    case = Case(BUTTERFLY, factors, 1, 2, 512, 32, 64, torch.bfloat16)
    layout = case.mask().to_dense()[0, 0].view(8, 64, 8, 64)[:, 0, :, 0]
    n, d, e, m = 512, 32, 2, 64
    read = 0
    for row in range(8):  # dq: a program a row of blocks
        read += 2 * e * m * d + e * m * d + 8 * m  # q, dout, dq, and lse, delta
        read += int(layout[row].sum()) * 2 * e * m * d
    for column in range(8):
        read += 4 * e * m * d
        read += int(layout[:, column].sum()) * (2 * e * m * d + 8 * m)
    read += 2 * e * n * d + 12 * n  # delta
    assert cost(case).backward_bytes == 2 * read


def test_ours_and_standard_attention_agree():
    assert largest_difference(SMALL, CPU) < 1e-5
    sparse = calls_of(replace(SMALL, kind=BUTTERFLY, factors=0), CPU)
    assert torch.equal(sparse.forward(), sparse.both()[0])


RAW = """==PROF== Connected to process 1
"ID","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_sectors_op_read.sum","lts__t_sectors_op_write.sum"
"","byte","byte","sector","sector"
"0","1,000","200","40","3"
"1","24","0","1","0"
"""


def test_the_counters_are_summed_over_kernels():
    found = counters.parse(RAW)
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
    with pytest.raises(counters.NoCountersError, match=message):
        counters.parse(text)


def test_without_ncu_a_row_says_so(monkeypatch):
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    (row,) = measure([SMALL], CPU, rounds=1, round_ms=0.0)
    assert row.reason == "ncu is not installed" and row.both_hbm is None
    assert row.both_ms > 0 and row.forward_ms > 0


def test_a_case_that_fails_is_a_row_with_its_reason(monkeypatch):
    real = measuring.calls_of

    def without_memory(case, device):
        if case.kind == STANDARD:
            raise torch.OutOfMemoryError("out of memory\nand more")
        return real(case, device)

    monkeypatch.setattr(measuring, "calls_of", without_memory)
    failed, fine = measure([replace(SMALL, kind=STANDARD), SMALL], CPU, counters=False, rounds=1, round_ms=0.0)
    assert failed.both_ms is None and failed.reason == "forward: out of memory; both: out of memory"
    assert fine.both_ms is not None and not fine.reason
    assert "- not measured: forward: out of memory" in report.markdown([failed, fine], {"device": "none"})


def test_the_page_and_the_plot(tmp_path):
    rows = []
    for dim in (32, 64):
        for case in every_density(Case(DENSE, None, 1, 8, 16384, dim, 128)):
            row = Row(case, cost(case), case.mask().density)
            row.forward_ms, row.both_ms = 5 * row.density + 0.1, 20 * row.density + 0.3
            row.forward_l2 = row.cost.forward_bytes * 1.1
            row.both_hbm = row.forward_hbm = 1e8
            rows.append(row)
    page = report.markdown(rows, {"device": "a test"})
    assert page.count("## batch 1") == 2 and "| butterfly, 1 factor |" in page
    line = next(line for line in page.splitlines() if line.startswith("| standard"))
    assert line.split("|")[3].strip() == "825"  # 6 products of 2 N^2 D, for 8 heads of 32
    assert line.endswith("| 0.1 | - | 20.3 |")
    report.plot(rows, tmp_path / "plot.png")
    from PIL import Image

    assert np.asarray(Image.open(tmp_path / "plot.png")).std() > 1


def test_the_command(tmp_path):
    arguments = ["table", "--batch", "1", "--heads", "1", "--length", "64", "--dim", "16", "--block", "16"]
    with mock.patch.object(measuring.timing, "LAUNCHES_A_ROUND", (1, 1)):
        done = CliRunner().invoke(app, [*arguments, "--dtype", "float32", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {"table.csv", "table.md", "table.png"}
    with open(tmp_path / "table.csv") as file:
        lines = list(csv.DictReader(file))
    assert [line["case"] for line in lines][:3] == ["standard", "dense", "butterfly, 2 factors"]
    assert all(float(line["ms"]) > 0 for line in lines)


@pytest.mark.parametrize("command", ["table", "theorem"])
def test_a_test_without_a_gpu_does_not_replace_results(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(app, [command, "--batch", "1", "--heads", "1", "--length", "256"])
    assert done.exit_code == 2
    assert "a test on the CPU must not replace what is in" in " ".join(done.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table", "--length", "100"], "must be a multiple of --block"),
        (["theorem", "--dtype", "int8"], "--dtype must be"),
    ],
)
def test_options_that_cannot_be_served_are_explained(arguments, message):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
