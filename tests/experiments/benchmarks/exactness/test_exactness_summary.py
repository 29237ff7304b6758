import json

import pytest
import torch
from typer.testing import CliRunner

from experiments.benchmarks.exactness.__main__ import RESULTS, app, condense, read
from experiments.benchmarks.harness import Bench
from experiments.measurements import Run
from experiments.measurements import read as measured
from tests.compared.closeness import NAMES, assert_exact


def record(dtype="float16", dim=64, worst=0.5, **changes):
    row = {"backend": "triton", "device": "cuda", "dtype": dtype, "dim": dim, "v_dim": dim, "tokens": 100}
    return row | {"problem": f"Problem({dim})"} | dict.fromkeys(RESULTS, 0.1) | {"dk": worst} | changes


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_it_reads_what_the_tests_write(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEFLASH_EXACTNESS", str(tmp_path / "records"))
    x = torch.tensor([1.0])
    truth = [x.double() + 8e-8] * 5
    plain, exact = (dict(zip(NAMES, values, strict=True)) for values in ([x.double() + 18e-8] * 5, truth))
    draws = iter([(exact, exact), (plain, exact), (plain, exact)])
    label = {"backend": "triton", "device": "cpu", "dtype": "float32", "dim": 16, "v_dim": 24, "tokens": 9}
    assert_exact([x] * 5, truth, draws, 1.0, label | {"problem": "Problem()"})
    assert len(list(draws)) == 1
    (found,) = read([tmp_path / "records"])
    assert tuple(NAMES) == RESULTS
    assert found["v_dim"] == 24
    assert 0.2 < found["worst"] < 0.3


def test_cases_are_counted_and_the_worst_is_kept(tmp_path):
    write(tmp_path / "a.jsonl", record(worst=0.2), record(worst=0.7, dim=128))
    write(tmp_path / "b.jsonl", record(dtype="bfloat16", worst=0.4))
    bench = Bench("exactness", Run("H200", "", {}, "", "", ""), tmp_path / "out.jsonl", torch.device("cpu"))
    condense(bench, read([tmp_path]))
    found = {each.name.removeprefix("exactness/"): (each.value, each.settings) for each in bench.measurements}
    assert found["float16/cases/triton"] == (2.0, {})
    assert found["float16/dk/triton"] == found["float16/worst/triton"] == (0.7, {})
    assert found["float16/128-128/triton"] == (0.7, {"cases": 1}) and "bfloat16/128-128/triton" not in found
    assert found["bfloat16/64-64/triton"] == (0.4, {"cases": 1})


@pytest.mark.parametrize(("worst", "code", "verdict"), [(1.5, 1, "1 beyond what"), (0.9, 0, "all within what")])
def test_a_case_beyond_what_is_allowed_is_said_and_fails_the_command(tmp_path, worst, code, verdict):
    write(tmp_path / "a.jsonl", record(), record(worst=worst))
    done = CliRunner().invoke(app, [str(tmp_path), "--about", "a test", "--out", str(tmp_path / "deep" / "b.jsonl")])
    assert done.exit_code == code
    assert f"2 drawn cases, {verdict} is allowed; the worst (float16, {worst:.3f}): Problem(64)" in done.output
    assert measured(tmp_path / "deep" / "b.jsonl")[0].helped == ("a test",)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "found no record"), ("{", "line 1: no JSON"), ('{"backend": "x"}', "line 1: no device, dtype")],
)
def test_what_is_no_record_is_refused(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read([tmp_path])
    done = CliRunner().invoke(app, [str(tmp_path)])
    assert done.exit_code == 2
