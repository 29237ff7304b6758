"""The experiment on small blocks: it times the tilings that it names, and a wrong result is an error."""

import pytest
import torch
from typer.testing import CliRunner

from experiments.benchmarks.blocks import measuring
from experiments.benchmarks.blocks.__main__ import app, speeds
from experiments.benchmarks.blocks.measuring import CHOSEN, OWN, Kernels
from experiments.benchmarks.harness import Bench
from experiments.benchmarks.tune.space import parse
from experiments.measurements import Measurement, Run, read
from sparseflash.backends.triton.architecture import architecture_of
from sparseflash.backends.triton.configs import Config
from sparseflash.backends.triton.portable.fitting import config_for


@pytest.fixture
def bench(tmp_path):
    return Bench("blocks", Run("CPU", "", {}, "", "", ""), tmp_path, torch.device("cpu"), rounds=1)


def test_a_kernel_is_timed_in_the_tiles_of_the_mask_in_the_chosen_and_in_all_others(bench):
    Kernels(32, 128, torch.device("cpu")).measure(bench, "random12", 16, every=True, kernels=("dq",))
    rows = bench.measurements
    tilings = {row.way: row.settings["tiling"] for row in rows}
    assert tilings[OWN] == "16x16x0"
    assert list(tilings)[:2] == [OWN, CHOSEN] and len(set(tilings.values())) == len(tilings) == 5
    assert min(rows, key=lambda row: row.settings["predicted"]).way in (CHOSEN, OWN)
    for row in rows:
        assert row.settings["config"].split("x")[0] == str(min(int(row.settings["tiling"].split("x")[0]), 64))
        # No difference at all on some processors, where NumPy sums alike in all tiles.
        assert row.value > 0 and row.settings["difference"] < 0.01
    assert rows[0].settings["difference"] == 0


def test_a_configuration_of_ones_own_is_timed_in_the_tiles_that_fit_it(bench):
    kernels = Kernels(32, 128, torch.device("cpu"))
    kernels.measure(bench, "random12", 16, configs=[Config(32, 32, 2, 1)], kernels=("dk_dv",))
    rows = bench.measurements
    assert [row.way for row in rows] == [OWN, CHOSEN, "with-32x32x2x1"]
    one = parse(rows[2].settings["config"])
    assert one[2:4] == (2, 1) and max(one[:2]) <= 32 and rows[2].settings["difference"] < 0.01
    assert (
        parse(rows[1].settings["config"])[2:]
        == config_for("dk_dv", architecture_of((9, 0)), "half", 32, (64, 64), False)[2:]
    )


def test_speed_is_relative_to_the_chosen_tiling_of_blocks_of_128():
    def row(block, way, kept, ms):
        settings = {"kept": kept, "predicted": 3.0, "tiling": "64x64x0", "config": "64x64x4x2"}
        return Measurement(f"blocks/local/64/{block}/dq/{way}", ms, 0.0, "ms", settings)

    rows = [row(128, OWN, 100, 9.0), row(128, CHOSEN, 100, 2.0), row(16, OWN, 30, 3.0), row(16, CHOSEN, 30, 1.0)]
    found = [line.partition("speed ")[2].partition(" of")[0] for line in speeds(rows)]
    assert found == ["0.22", "1.00", "0.20", "0.60"]
    assert speeds(rows)[2] == (
        "local D=64, blocks of 16, dq, own (64x64x0, 64x64x4x2): speed 0.20 of blocks of 128, wanted 0.40; cost 1.00"
    )


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_the_command_ends_with_an_error_if_a_tiling_gives_other_results(tmp_path, monkeypatch, factor):
    right = measuring._difference

    def judged(got, want):
        return right([x * factor for x in got] if got is not want else got, want)

    monkeypatch.setattr(measuring, "_difference", judged)
    options = {"device": "cpu", "length": 128, "dim": 32, "mask": "local", "block": 32, "kernel": "dq", "out": tmp_path}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == (0 if factor == 1.0 else 1), done.output
    assert ("WRONG" in done.output) == (factor != 1.0)
    assert [each.name for each in read(tmp_path / "blocks.jsonl")[1]] == [
        f"blocks/local/32/{block}/dq/{way}" for block in (128, 32) for way in (OWN, CHOSEN)
    ]


def test_an_unknown_mask_is_refused():
    done = CliRunner().invoke(app, ["--device", "cpu", "--mask", "moebius"])
    assert done.exit_code == 2 and "--mask must be from butterfly" in done.output
