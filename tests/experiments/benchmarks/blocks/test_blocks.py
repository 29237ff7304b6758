"""The experiment on small blocks: what it times is what it says, and a wrong result is an error."""

import csv

import pytest
import torch
from typer.testing import CliRunner

from experiments.benchmarks.blocks import measuring
from experiments.benchmarks.blocks.__main__ import app, speeds
from experiments.benchmarks.blocks.measuring import CHOSEN, OWN, Bench, Measured
from sparseflash.backends.triton.configs import Config
from sparseflash.backends.triton.portable.fitting import config_for
from sparseflash.backends.triton.schedule.tilings import Tiling


def test_a_kernel_is_timed_in_the_tiles_of_the_mask_in_the_chosen_and_in_all_others():
    rows = Bench(32, 128, torch.device("cpu")).measure("random12", 16, every=True, kernels=("dq",), round_ms=0.0)
    tilings = {row.way: row.tiling for row in rows}
    assert tilings[OWN] == Tiling(16, 16)
    assert list(tilings)[:2] == [OWN, CHOSEN] and len(set(tilings.values())) == len(tilings) == 5
    assert min(rows, key=lambda row: row.predicted).way in (CHOSEN, OWN)
    for row in rows:
        assert row.config[0] == min(row.tiling.held, 64)
        assert (
            row.ms > 0 and row.difference < 0.01
        )  # none at all on some processors, where NumPy sums alike in all tiles
    assert rows[0].difference == 0


def test_a_configuration_of_ones_own_is_timed_in_the_tiles_that_fit_it():
    bench = Bench(32, 128, torch.device("cpu"))
    rows = bench.measure("random12", 16, configs=[Config(32, 32, 2, 1)], kernels=("dk_dv",), round_ms=0.0)
    assert [row.way for row in rows] == [OWN, CHOSEN, "with 32x32x2x1"]
    assert rows[2].config[2:4] == (2, 1) and max(rows[2].config[:2]) <= 32 and rows[2].difference < 0.01
    assert rows[1].config[2:] == config_for("dk_dv", (9, 0), "half", 32, (64, 64), False)[2:]


def test_speed_is_relative_to_the_chosen_tiling_of_blocks_of_128():
    def row(block, way, kept, ms):
        return Measured("local", block, 64, "dq", way, Tiling(64, 64), (64, 64, 4, 2), 512, kept, 9, 1.0, ms, 0.0)

    rows = [row(128, OWN, 100, 9.0), row(128, CHOSEN, 100, 2.0), row(16, OWN, 30, 3.0), row(16, CHOSEN, 30, 1.0)]
    assert speeds(rows) == pytest.approx([2 / 9, 1.0, 0.2, 0.6])


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
    with open(tmp_path / "blocks.csv") as file:
        lines = list(csv.DictReader(file))
    assert [(line["block"], line["way"]) for line in lines] == [
        ("128", OWN), ("128", CHOSEN), ("32", OWN), ("32", CHOSEN)
    ]  # fmt: skip


def test_an_unknown_mask_is_refused():
    done = CliRunner().invoke(app, ["--device", "cpu", "--mask", "moebius"])
    assert done.exit_code == 2 and "--mask must be one of" in done.output
