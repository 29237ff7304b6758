import re

import pytest
import torch
from typer.testing import CliRunner

from experiments.pathx import throughput
from experiments.pathx.cli import app
from experiments.pathx.config import Config
from experiments.training.profiling import costs_of


@pytest.mark.parametrize("background", ["drop", "keep"])
def test_a_probe_measures_steps(background):
    case = throughput.Case(32, 6, "near:4,dense", background)
    config = Config(width=16, heads=2, mlp=16, precision="fp32", block=32)
    found = throughput.measured(case, config, 2048, torch.device("cpu"), 0.01)
    assert found["tokens_per_s"] == pytest.approx(
        found["images_per_s"] * found["live"] * 2048 / found["images_a_step"], rel=0.3
    )
    assert 0 < found["tiles"] <= 1
    assert found["step_ms"] > 0 and found["masks_ms"] > 0
    if background == "keep":
        assert (found["live"], found["images_a_step"]) == (1, 2)


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


def test_a_probe_shows_what_its_steps_are_made_of():
    words = ["--sizes=32", "--contour=6", "--masks=dense", "--tokens=1024", "--block=32", "--precision=fp32"]
    words += ["--width=16", "--heads=2", "--mlp=16", "--seconds=0.01", "--device=cpu", "--profile=3"]
    result = CliRunner().invoke(app, ["probe", *words])
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"^ +[\d.]+ ms +[\d.]+ calls  \S", result.output, re.MULTILINE)) == 3


def test_names_of_kernels_are_shown_as_they_are(monkeypatch):
    name = "void at::fill<int [4]>(std::array<char*, 2>)::[lambda](float)"
    monkeypatch.setattr(throughput, "measured", lambda *_, **__: {
        "size": 32, "layers": "dense", "step_ms": 1.0, "masks_ms": 1.0, "tokens_per_s": 1.0, "images_per_s": 1.0,
        "tiles": 1.0, "memory_gb": None, "device": "a device", "costs": [{"name": name, "ms": 1.0, "calls": 1.0}],
    })  # fmt: skip
    result = CliRunner().invoke(app, ["probe", "--sizes=32", "--masks=dense", "--device=cpu", "--profile=1"])
    assert result.exit_code == 0, result.output
    assert name in result.output


def test_a_probe_of_a_gpu_is_not_begun_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["probe"])
    assert result.exit_code == 2 and "there is no CUDA device" in result.output
