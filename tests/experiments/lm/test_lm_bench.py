import csv
import json

import pytest
import torch
from typer.testing import CliRunner

from experiments import measurements
from experiments.lm import bench, flops
from experiments.lm.bench_plot import lines
from experiments.lm.bench_report import over_sdpa, table, write
from experiments.lm.cases import DEFAULT, Case, parsed
from experiments.lm.cli import app
from experiments.training.profiling import costs_of
from tests.experiments.training.host_graphs import use_host_graphs

SMALL = {"micro_tokens": 128, "vocabulary": 256, "block": 16, "window": 32}


def rows_of(*cases, minutes=10.0, recorded=False):
    chosen = {**SMALL, "depth": 2, "width": 96}
    options = bench.Options(minutes, tokens=256, rounds=2, round_seconds=0.01, recorded=recorded, chosen=chosen)
    return bench.measure(
        [each for case in cases for each in parsed(case)], options, torch.device("cpu"), lambda _: None
    )


def test_rows_of_a_context_share_the_model_and_are_measured_in_turns():
    rows = rows_of("cpu:64,128:dense,local|butterfly:sparseflash,sdpa,flex")
    assert len(rows) == 12
    done = [row for row in rows if row.case.attention != "flex"]
    assert all(len(row.rounds) == 2 and not row.failure for row in done)
    assert all(row.failure.startswith("NotImplementedError") for row in rows if row.case.attention == "flex")
    assert {(row.case.context, row.batch, row.part) for row in rows} == {(64, 4, 2), (128, 2, 1)}
    dense = rows[0]
    assert dense.density == pytest.approx(65 / 128)
    assert over_sdpa(dense, rows) == dense.tokens_per_s / rows[1].tokens_per_s
    weights = flops.matrix_weights(2, 96, 96, 384, 256)
    assert dense.flops_a_token == flops.of_token(weights, 48, 2 * 2 * 64 * 65 / 2, 64)
    assert dense.mfu is None
    assert "failed" in [*table(rows).columns[4].cells]


def test_rows_are_measured_with_graphs_and_without(monkeypatch, tmp_path):
    use_host_graphs(monkeypatch)
    monkeypatch.setattr(bench, "check_recordable", lambda device: None)
    rows = rows_of("cpu:64:dense:sparseflash,sdpa", "cpu:128:dense:sdpa", recorded=True)
    assert [(row.case.context, row.case.attention, row.case.recorded) for row in rows] == [
        (64, "sparseflash", False), (64, "sparseflash", True), (64, "sdpa", False), (64, "sdpa", True),
        (128, "sdpa", False), (128, "sdpa", True),
    ]  # fmt: skip
    assert all(len(row.rounds) == 2 and not row.failure for row in rows)
    assert over_sdpa(rows[1], rows) == rows[1].tokens_per_s / rows[3].tokens_per_s
    assert [*table(rows).columns[3].cells][:2] == ["sparseflash", "sparseflash, recorded"]
    write(tmp_path, rows, {}, {})
    with open(tmp_path / "bench.csv") as file:
        assert [row["recorded"] for row in csv.DictReader(file)] == 3 * ["False", "True"]
    found = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert {"cpu dense sdpa", "cpu dense sdpa, recorded"} < lines(found, "tokens_per_s").keys()


@pytest.mark.parametrize("kind", ["moba", "msa", "nsa"])
def test_layers_that_choose_are_measured_beside_others(kind):
    rows = rows_of(f"cpu:64:dense,{kind},local+{kind}:sparseflash")
    assert [row.failure for row in rows] == 3 * [""]
    assert all(len(row.rounds) == 2 for row in rows)
    assert rows[1].density < rows[0].density


def test_graphs_must_have_a_gpu():
    done = CliRunner().invoke(app, ["bench", "--case", "cpu:64:dense:sdpa", "--recorded", "--device", "cpu"])
    assert done.exit_code == 2 and "--recorded must have one process on a GPU" in done.stderr


def test_what_the_time_does_not_allow_says_so():
    (row,) = rows_of("cpu:64:dense:sparseflash", minutes=0.0)
    assert row.failure == "out of time" and not row.rounds


def test_what_needs_too_much_memory_says_so_and_the_others_go_on(monkeypatch):
    def refuses(q, k, v):
        raise torch.OutOfMemoryError("too much")

    right = bench.attention_over
    monkeypatch.setattr(bench, "attention_over", lambda mask, name: refuses if name == "sdpa" else right(mask, name))
    rows = rows_of("cpu:64:dense:sdpa,sparseflash")
    assert rows[0].failure == "out of memory" and not rows[0].rounds
    assert rows[1].rounds


def test_the_default_cases_cover_what_the_table_shows():
    cases = [each for text in DEFAULT for each in parsed(text)]
    assert (
        Case("1.3B", 8192, "dense", "flex") in cases and Case("124M", 65_536, "local|butterfly", "sparseflash") in cases
    )
    assert parsed("cpu:64:local+dense:sdpa")[0].pattern == "local,dense"
    own = parsed("cpu:64:a/mine.py:rule+local(n, window=9),dense:sdpa")
    assert [case.pattern for case in own] == ["a/mine.py:rule,local(n, window=9)", "dense"]


def test_results_are_written_with_what_is_needed_to_repeat_them(tmp_path):
    words = ["bench", "--case", "cpu:64:dense:sparseflash,flex", "--tokens", "128", "--rounds", "1", "--device", "cpu"]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    options += ["--record", str(tmp_path / "cpu.jsonl")]
    done = CliRunner().invoke(app, [*words, *options, "--out", str(tmp_path)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    ours, flex = measurements.read(tmp_path / "cpu.jsonl")[1]
    assert ours.name == "lm-speed/cpu/64/dense/tokens/sparseflash" and ours.value > 0
    assert flex.way == "flex" and flex.failure.startswith("NotImplementedError")
    with open(tmp_path / "bench.csv") as file:
        first, second = csv.DictReader(file)
    assert float(first["tokens_per_s"]) > 0 and second["failure"].startswith("NotImplementedError")
    assert {"device", "torch", "triton", "commit", "command"} <= first.keys()
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["settings"]["tokens"] == 128 and len(found["rows"]) == 2
    shown = CliRunner().invoke(app, ["show", str(tmp_path), "--out", str(tmp_path / "plots.png")])
    assert shown.exit_code == 0 and (tmp_path / "plots.png").stat().st_size > 1000
    (tmp_path / "bench.json").write_text(json.dumps({**found, "rows": found["rows"][1:]}))
    shown = CliRunner().invoke(app, ["show", str(tmp_path), "--out", str(tmp_path / "plots.png")])
    assert shown.exit_code == 2 and "must have a row with numbers" in shown.stderr


def test_a_profile_lists_the_operations_of_each_row_the_longest_first(tmp_path):
    words = ["bench", "--case", "cpu:64:dense:sdpa,flex", "--tokens=128", "--rounds=1", "--device=cpu", "--profile"]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    done = CliRunner().invoke(app, [*words, *options, "--out", str(tmp_path)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    with open(tmp_path / "kernels.csv") as file:
        rows = list(csv.DictReader(file))
    assert {row["attention"] for row in rows} == {"sdpa"}
    assert any("mm" in row["kernel"] for row in rows)
    times = [float(row["ms"]) for row in rows]
    assert times == sorted(times, reverse=True) and times[0] > 0


def test_the_costs_of_a_step_are_those_of_what_it_runs():
    x = torch.randn(300, 300)

    def step(number):
        for _ in range(number + 1):
            x @ x
        x.exp()

    found = costs_of(step, 3, torch.device("cpu"))
    calls = {cost.name: cost.calls for cost in found}
    assert calls["aten::mm"] == 2 and calls["aten::exp"] == 1
    assert [cost.ms for cost in found] == sorted((cost.ms for cost in found), reverse=True)
    assert found[0].ms > 0
