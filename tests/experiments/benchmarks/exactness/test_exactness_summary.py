"""From the records of an exactness run to its page."""

import json

import pytest
from typer.testing import CliRunner

from closeness import NAMES, assert_exact
from experiments.benchmarks.exactness.__main__ import app
from experiments.benchmarks.exactness.summary import RESULTS, by_dim, by_dtype, markdown, read


def record(dtype="float16", dim=64, worst=0.5, **changes):
    row = {"backend": "triton", "device": "cuda", "dtype": dtype, "dim": dim, "v_dim": dim, "tokens": 100}
    return row | {"problem": f"Problem({dim})"} | dict.fromkeys(RESULTS, 0.1) | {"dk": worst} | changes


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_it_reads_what_the_tests_write(tmp_path, monkeypatch):
    import torch

    monkeypatch.setenv("SPARSEFLASH_EXACTNESS", str(tmp_path / "records"))
    x = torch.tensor([1.0])
    truth = [x.double() + 8e-8] * 5
    plain, exact = (dict(zip(NAMES, values, strict=True)) for values in ([x.double() + 18e-8] * 5, truth))
    draws = iter([(exact, exact), (plain, exact), (plain, exact)])
    label = {"backend": "triton", "device": "cpu", "dtype": "float32", "dim": 16, "v_dim": 24, "tokens": 9}
    assert_exact([x] * 5, truth, draws, 1.0, label | {"problem": "Problem()"})
    assert len(list(draws)) == 1  # by the first draw alone the error is two thirds of what is allowed
    frame = read([tmp_path / "records"])
    assert len(frame) == 1
    assert tuple(NAMES) == RESULTS
    assert frame.loc[0, "v_dim"] == 24
    assert 0.2 < frame.loc[0, "worst"] < 0.3


def test_cases_are_counted_and_the_worst_is_kept(tmp_path):
    write(tmp_path / "a.jsonl", record(worst=0.2), record(worst=0.7, dim=128))
    write(tmp_path / "b.jsonl", record(dtype="bfloat16", worst=0.4))
    frame = read([tmp_path])
    table = by_dtype(frame).set_index("dtype")
    assert table.loc["float16", ["cases", "D", "dk", "worst"]].tolist() == [2, "64 to 128", 0.7, 0.7]
    assert by_dim(frame).set_index("D / Dv").loc["128 / 128"].to_dict() == {"bfloat16": "", "float16": "0.70 (1)"}
    page = markdown(frame, ["one device"])
    assert "3 drawn cases" in page
    assert "all within what is allowed" in page
    assert "- one device" in page
    assert "Problem(128)" in page


def test_a_case_beyond_what_is_allowed_is_said_and_fails_the_command(tmp_path):
    write(tmp_path / "a.jsonl", record(), record(worst=1.5))
    done = CliRunner().invoke(app, ["drawn", str(tmp_path), "--out", str(tmp_path / "deep" / "page.md")])
    assert done.exit_code == 1
    assert "**1 beyond what is allowed**" in (tmp_path / "deep" / "page.md").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "found no record"), ("{", "line 1: no JSON"), ('{"backend": "x"}', "line 1: no device, dtype")],
)
def test_what_is_no_record_is_refused(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read([tmp_path])
    done = CliRunner().invoke(app, ["drawn", str(tmp_path)])
    assert done.exit_code == 2
