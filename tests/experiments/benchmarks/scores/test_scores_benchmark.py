import re

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from typer.testing import CliRunner

from experiments.benchmarks.scores import NAMES, app, case
from experiments.measurements import read
from sparseflash import attention, interop, masks


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_each_case_is_the_same_in_both_libraries():
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    mask = masks.causal(40, block=16)
    block_mask = interop.to_flex(mask)
    for each in (case(name, 2, mask, torch.float32) for name in NAMES):
        if each.score_mod is not None:
            got = attention(q, k, v, mask, scores=each.changes())
            wanted = flex_attention(q, k, v, score_mod=each.score_mod, block_mask=block_mask)
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


SMALL = ["--device", "cpu", "--length", "128", "--heads", "1", "--dim", "16"]


def test_the_command_times_all_cases_and_writes_a_table(tmp_path):
    done = CliRunner().invoke(
        app, [*SMALL, "--rounds", "1", "--case", "sink", "--case", "alibi", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    assert re.search(
        r"\| scores/16/sink/both \| [\d.]+ ms \(\**x[\d.]+\**\) \| [\d.]+ ms \|", done.output
    )  # over plain
    assert {(each.name, each.unit) for each in read(tmp_path / "scores.jsonl")[1]} == {
        (f"scores/16/{case}/{part}/{way}", "ms")
        for case in ("sink", "alibi")
        for part in ("forward", "both")
        for way in ("sparseflash", "sparseflash-plain")
    }


def test_first_uses_are_timed_in_new_processes(tmp_path):
    done = CliRunner().invoke(app, [*SMALL, "--first", "--flex", "--case", "sink", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = read(tmp_path / "scores.jsonl")[1]
    assert [each.name for each in found] == [
        f"scores/first-use/{case}-{part}/sparseflash" for case in ("plain", "sink") for part in ("forward", "both")
    ]
    assert all(each.value > 0 and each.unit == "s" for each in found)


@pytest.mark.parametrize("arguments", [["--case", "nope"]])
def test_unknown_cases_are_refused(arguments):
    done = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert done.exit_code == 2 and "case must be from alibi" in done.output
