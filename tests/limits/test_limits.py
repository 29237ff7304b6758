import pytest
import torch
from typer.testing import CliRunner

from experiments.measurements import read
from tests.limits import cases
from tests.limits.__main__ import app
from tests.limits.cases import CASES, Scale, compared

AT = Scale(torch.device("cpu"), tiny=True)


@pytest.mark.parametrize("name", CASES)
def test_a_case_in_tiny_sizes_is_exact(name):
    rows = list(compared(name, "triton", AT))
    assert {"out", "lse"} <= {row["result"] for row in rows}
    assert all(row["ratio"] <= 1 and row["allowed"] < 0.02 for row in rows), rows


@pytest.mark.parametrize("result", ["out", "lse", "dq", "dk", "dv", "dbias"])
def test_a_wrong_number_anywhere_in_what_is_compared_is_found(monkeypatch, result):
    def with_a_wrong_number(case, backend, original=cases._results):
        found = original(case, backend)
        sample = case.samples[0]
        whole = found[result] = found[result].clone()
        keys = sample.rows if result in ("out", "lse", "dq") else sample.keys
        at = (0, 0, sample.rows.stop - 1, sample.keys.stop - 1) if result == "dbias" else (0, 0, keys.stop - 1)
        whole[at] += 0.1
        return found

    monkeypatch.setattr(cases, "_results", with_a_wrong_number)
    ratios = {row["result"]: row["ratio"] for row in compared("bias of 17M keys", "triton", AT)}
    assert [name for name, ratio in ratios.items() if ratio > 1] == [result]


def test_the_command_records_errors_and_fails_if_a_case_does(tmp_path, monkeypatch):
    names = ["out of far tokens", "cache of 2^31 elements"]
    command = ["--device", "cpu", "--commit", "abc", "--out", str(tmp_path)]
    command += [word for name in names for word in ("--case", name)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    run, found = read(tmp_path / "exactness.jsonl")
    assert run.commit == "abc" and [each.name.removeprefix("exactness/large/") for each in found] == [
        *(f"out-of-far-tokens/float16/{result}/triton" for result in ("out", "lse", "dq")),
        *(f"cache-of-2-31-elements/float16/{result}/triton" for result in ("out", "lse")),
    ]
    assert all(each.value <= 1 and each.settings["error"] <= each.settings["allowed"] for each in found)

    def fails(case, backend):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(cases, "_results", fails)
    done = CliRunner().invoke(app, command)
    assert (
        done.exit_code == 1
        and "out-of-far-tokens/float16/out/triton: RuntimeError: an illegal memory access" in done.output
    )


def test_unknown_cases_are_refused():
    done = CliRunner().invoke(app, ["--device", "cpu", "--case", "nope"])
    assert done.exit_code == 2 and "--case must be from" in done.output
