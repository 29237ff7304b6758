"""The benchmark of changed scores runs, and both libraries compute the same in each case."""

import csv

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from typer.testing import CliRunner

from experiments.benchmarks.scores.__main__ import app
from experiments.benchmarks.scores.cases import NAMES, cases
from sparseflash import attention, interop, masks


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_each_case_is_the_same_in_both_libraries():
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    mask = masks.causal(40, block=16)
    block_mask = interop.to_flex(mask)
    for case in cases(2, mask, torch.float32, NAMES):
        if case.score_mod is not None:
            got = attention(q, k, v, mask, scores=case.changes())
            wanted = flex_attention(q, k, v, score_mod=case.score_mod, block_mask=block_mask)
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


SMALL = ["--device", "cpu", "--length", "128", "--heads", "1", "--dim", "16"]


def test_the_command_times_all_cases_and_writes_a_table(tmp_path):
    done = CliRunner().invoke(
        app, [*SMALL, "--rounds", "1", "--case", "sink", "--case", "alibi", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    assert "over plain" in done.output
    with (tmp_path / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["case"], row["pass"]) for row in rows} == {
        (case, part) for case in ("plain", "sink", "alibi") for part in ("forward", "with backward")
    }
    assert all(float(row["ms"]) > 0 for row in rows)


def test_first_uses_are_timed_in_new_processes(tmp_path):
    done = CliRunner().invoke(app, [*SMALL, "--first", "--flex", "--case", "sink", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    with (tmp_path / "first_use.csv").open() as file:
        rows = list(csv.DictReader(file))
    # FlexAttention has no sinks.
    assert [(row["library"], row["first"]) for row in rows] == [
        ("sparseflash", f"{case} {part}") for case in ("plain", "sink") for part in ("forward", "with backward")
    ]
    assert all(float(row["seconds"]) > 0 for row in rows)


@pytest.mark.parametrize("arguments", [["--case", "nope"]])
def test_unknown_cases_are_refused(arguments):
    done = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert done.exit_code == 2 and "case must be of" in done.output
