import warnings

import torch
from typer.testing import CliRunner

from experiments.benchmarks.distributed.__main__ import app
from experiments.benchmarks.distributed.ways import PEER, WAYS
from experiments.measurements import read
from tests.processes.forked import execute, ranks


def test_an_unknown_pattern_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["measure", "--pattern", "spiral", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "--pattern must be from butterfly" in result.output


def test_a_measurement_without_torchrun_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["measure", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "torchrun must start the processes: torchrun --nproc-per-node 2 -m" in " ".join(
        result.output.replace("│", " ").split()
    )


def timed_briefly(*command):
    from experiments.benchmarks.distributed import measure

    warnings.simplefilter("error", FutureWarning)
    measure.ROUNDS, measure.SERIES_MS = 2, 2.0
    execute(*command)


def test_two_processes_are_timed(tmp_path):
    command = ["-m", "experiments.benchmarks.distributed", "measure", "--pattern", "causal", "--device", "cpu"]
    command += ["--tokens", "512", "--heads", "4:2", "--dim", "16", "--commit", "abc", "--out", tmp_path]
    ranks(timed_briefly, *command, processes=2)
    run, measurements = read(tmp_path / "distributed.jsonl")
    assert run.commit == "abc" and run.command.startswith("torchrun --nproc-per-node 2 -m experiments.benchmarks.distr")
    assert run.versions["torch"] == torch.__version__
    found = {each.name.removeprefix("distributed/causal/heads4of2/"): each for each in measurements}
    plan = found.pop("distributed/causal/plan/host")
    assert plan.value > 0 and list(found) == [f"{which}/{way}" for way in WAYS for which in ("forward", "both")]
    for which in ("forward", "both"):
        assert found.pop(f"{which}/{PEER}").failure == "ValueError: dense and causal attention on GPUs only"
    for each in found.values():
        assert each.value > 0 and each.settings["error"] <= 1.0 and each.settings["ranks"] == 2
    auto = found["forward/auto"].settings
    assert auto["sent"] == auto["needed"] > 0 and auto["chosen"]
