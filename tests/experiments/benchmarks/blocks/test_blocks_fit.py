"""The fit of the plan's cost: constants that made the times are found again, and a bad choice is reported."""

import math

import pandas as pd
import pytest
from typer.testing import CliRunner

from experiments import measurements
from experiments.benchmarks.blocks import fit
from sparseflash.backends.triton.architecture import architecture_of
from sparseflash.backends.triton.portable.fitting import config_for
from sparseflash.backends.triton.schedule.tilings import HALF

TRUE = HALF._replace(loading=0.3, loading_gathered=0.9, step=0.2, program=4.0)
TILINGS = ["16x16x0", "32x32x0", "64x64x0", "64x128x0", "64x64x16", "64x128x32", "32x64x16"]


def times_of(cost, noise=0.0):
    """Times of made-up cases in proportion to that cost, of two kernels with units of their own."""
    rows = []
    for number, tiling in enumerate(TILINGS * 4):
        held, streamed, _ = map(int, tiling.split("x"))
        kernel = "forward" if number % 2 else "dk_dv"
        config = f"{held}x{streamed}x4x2" if kernel == "forward" else f"{streamed}x{held}x4x2"
        tiles = 1000 * (1 + number % 5)
        rows.append(("local", 16 << number % 3, 64, kernel, tiling, config, 4096, tiles))
    frame = pd.DataFrame(rows, columns=["kind", "block", "dim", "kernel", "tiling", "config", "length", "tiles"])
    unit = frame.kernel.map({"forward": 1e-5, "dk_dv": 3e-5})
    return frame.assign(
        ms=fit.costs(frame, cost) * unit * [math.exp(noise * (-1) ** (i // 2)) for i in range(len(frame))]
    )


def write(frame, path):
    found = [
        measurements.Measurement(f"blocks/case{number}/way", row.pop("ms"), 0.0, "ms", row)
        for number, row in enumerate(frame.to_dict("records"))
    ]
    measurements.write(path, measurements.Run("H200", "", {}, "", "", ""), found)


def test_the_constants_behind_the_times_are_found():
    frame = times_of(TRUE)
    found = fit.fit(frame)
    for name in fit.FITTED:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3)
    assert fit.scatter(frame, found) < 1e-4 < 0.01 < fit.scatter(frame, HALF)
    assert fit.scatter(times_of(TRUE, noise=0.2), TRUE) == pytest.approx(0.2, rel=0.05)


def test_a_choice_is_compared_with_the_fastest():
    frame = pd.DataFrame(
        [
            ("local", 16, 64, "dq", "16x16x0", "16x16x1x2", 4096, 100_000, 2.0),
            ("local", 16, 64, "dq", "64x64x0", "64x64x4x2", 4096, 100, 3.0),
            ("local", 64, 64, "dq", "64x64x0", "64x64x4x2", 4096, 100, 1.0),  # nothing to choose from
        ],
        columns=["kind", "block", "dim", "kernel", "tiling", "config", "length", "tiles", "ms"],
    )
    (case,) = fit.chosen(frame, HALF).itertuples()
    assert (case.block, case.tiling, case.best, case.slower) == (16, "64x64x0", "16x16x0", 1.5)
    # The mask's own tiling is kept where another is hardly cheaper.
    near = frame.assign(tiles=[1000, int(1000 * HALF.of_step(16, 16) / HALF.of_step(64, 64)), 100], length=1)
    assert fit.chosen(near, HALF).tiling.tolist() == ["16x16x0"]


def test_what_would_not_run_today_is_left_out(tmp_path):
    columns = ["kind", "block", "dim", "kernel", "tiling", "config", "length", "tiles", "ms"]
    one = config_for("dk_dv", architecture_of((9, 0)), "half", 64, (32, 32), True)
    rows = [
        ("local", 32, 64, "dk_dv", "32x32x0", config, 4096, 100, ms)
        for config, ms in [("32x32x4x3", 1.0), (str(one), 3.0), (str(one._replace(num_stages=2)), 2.0)]
    ]
    write(pd.DataFrame(rows, columns=columns), tmp_path / "blocks.jsonl")
    assert fit.read([tmp_path / "blocks.jsonl"]).ms.tolist() == [1.0, 3.0, 2.0]
    assert fit.read([tmp_path / "blocks.jsonl"], shipped=True).ms.tolist() == [2.0]


def test_the_command_says_what_it_found(tmp_path):
    write(times_of(TRUE, noise=0.1), tmp_path / "blocks.jsonl")
    done = CliRunner().invoke(fit.app, [str(tmp_path / "blocks.jsonl")])
    assert done.exit_code == 0, done.output
    assert "shipped" in done.output and "28 times, 6 choices" in done.output
    assert "loading_gathered" in done.output
