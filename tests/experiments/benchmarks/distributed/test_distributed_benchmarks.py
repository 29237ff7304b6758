"""Plans simulated for many ranks, and times of two processes."""

import csv
import json
import warnings

import pytest
import torch
from typer.testing import CliRunner

from experiments.benchmarks.distributed.__main__ import app
from experiments.benchmarks.distributed.simulate import PATTERNS, SHAPE
from experiments.benchmarks.distributed.ways import PEER, WAYS
from forked import execute, ranks
from sparseflash import distributed


def test_a_simulation_writes_the_table_the_numbers_and_the_plot(tmp_path):
    options = ["--pattern", "butterfly", "--pattern", "causal", "--tokens", "16384", "--ranks", "2", "--ranks", "64"]
    result = CliRunner().invoke(app, ["simulate", *options, "--ranks", "1024", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    with (tmp_path / "simulated.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # 16,384 tokens are 128 blocks, too few for 1,024 ranks.
    assert [(row["pattern"], row["ranks"]) for row in rows] == [
        ("butterfly", "2"), ("butterfly", "64"), ("causal", "2"), ("causal", "64")
    ]  # fmt: skip
    plan = distributed.shard(PATTERNS["butterfly"][0](16384), ranks=2)
    assert float(rows[0]["mean_mb"]) == pytest.approx(plan.traffic(1, 8).sent.mean() * SHAPE.key_bytes / 1e6)
    assert float(rows[0]["gather_mb"]) == pytest.approx(8192 * 8 * SHAPE.key_bytes / 1e6)
    assert rows[1]["heads_ms"] == ""  # fewer key heads than ranks
    assert "### causal" in (tmp_path / "simulated.md").read_text()
    assert (tmp_path / "simulated.png").stat().st_size > 1000


def test_an_unknown_pattern_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["simulate", "--pattern", "spiral", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "must be one of" in result.output


def test_a_measurement_without_torchrun_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["measure", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "torchrun must start the processes: torchrun --nproc-per-node 2 -m" in result.output


def timed_briefly(*command):
    """The command with short series: a test asks what is timed, not how exactly. Deprecated names are errors."""
    from experiments.benchmarks.distributed import measure

    warnings.simplefilter("error", FutureWarning)
    measure.ROUNDS, measure.SERIES_MS = 2, 2.0
    execute(*command)


def test_two_processes_are_timed(tmp_path):
    command = ["-m", "experiments.benchmarks.distributed", "measure", "--pattern", "causal", "--device", "cpu"]
    command += ["--tokens", "512", "--heads", "4:2", "--dim", "16", "--commit", "abc", "--out", tmp_path]
    ranks(timed_briefly, *command, processes=2)
    found = json.loads((tmp_path / "measured.json").read_text())
    assert found["facts"]["ranks"] == 2 and found["facts"]["commit"] == "abc"
    assert found["facts"]["torch"] == torch.__version__
    rows = {row["way"]: row for row in found["rows"]}
    assert rows.keys() == set(WAYS)
    assert rows.pop(PEER)["failure"] == "dense and causal attention on GPUs only"
    for row in rows.values():
        assert len(row["forward"]) == len(row["both"]) == 2  # rounds
        assert min(row["forward"] + row["both"]) > 0 and row["error"] <= 1.0
    assert rows["auto"]["sent"] == rows["auto"]["needed"] > 0
    table = (tmp_path / "measured.md").read_text()
    assert "### 4:2 heads" in table and f"| causal | auto ({rows['auto']['chosen']}) |" in table
