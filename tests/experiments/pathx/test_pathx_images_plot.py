import json

import pytest
from typer.testing import CliRunner

from experiments.measurements import read
from experiments.pathx import cli, images_plot
from experiments.pathx.cli import RESULTS, WEIGHTS


def test_all_seeds_that_the_mean_counts_are_in_the_plot():
    found = images_plot.curves(RESULTS, WEIGHTS)
    sparse = [each for each in found if each.kind == "label-free-tiles16x5-butterfly8x4"]
    stored = {each.name: each for each in read(RESULTS / "models.jsonl")[1]}
    mean = stored["pathx/path-x/accuracy/labels-alone/block-sparse"]
    assert sorted(100 * each.tested for each in sparse) == pytest.approx(sorted(mean.settings["runs"]))
    assert {each.kind for each in found} == set(images_plot.KINDS)


def test_a_validation_stands_at_the_images_of_its_step(tmp_path):
    train = {"columns": ["step", "stage", "images"], "rows": [[0, 0, 0], [100, 0, 1000], [200, 1, 3000]]}
    val = {"columns": ["step", "stage", "accuracy"], "rows": [[50, 0, 0.9], [150, 1, 0.6], [200, 1, 0.8]]}
    run = {"name": "label-free-unet-seed3", "curriculum": [{}, {}], "curve": {"train": train, "val": val}}
    (tmp_path / "curves.jsonl").write_text(json.dumps(run) + "\n" + json.dumps({**run, "name": "other"}) + "\n")
    (tmp_path / "runs").mkdir()
    note = {"sha256": "", "results": {"128-14-drop": {"accuracy": 0.75}}}
    (tmp_path / "runs" / "label-free-unet-seed3.json").write_text(json.dumps(note))
    (found,) = images_plot.curves(tmp_path)
    assert found == images_plot.Curve("label-free-unet-seed3", "label-free-unet", (2000, 3000), (0.6, 0.8), 3000, 0.75)
    images_plot.plot([found], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_the_command_prints_every_run(tmp_path):
    result = CliRunner().invoke(cli.app, ["plot", "--out", str(tmp_path / "a.png")], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "label-free-unet: 98.58 % after 1,201,792 images" in result.output
