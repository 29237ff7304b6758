import re

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from experiments.pathfinder import cli, original
from experiments.pathfinder.draw import draw
from experiments.pathfinder.parameters import lra
from experiments.pathfinder.picture import picture, strip
from experiments.pathfinder.vectors import collect, load
from tests.experiments.pathfinder.parameters import OTHER


def call(*words):
    return CliRunner().invoke(cli.app, list(map(str, words)))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def test_generate_then_export(data):
    result = call("generate", "--size", 32, "--contour", 9, "--images", 20, "--out", data, "--workers", 1)
    assert result.exit_code == 0, result.output
    assert "Generated images (not the released ones)" in result.output
    path = data / "pathfinder32-cl9-generated-20-seed0.safetensors"
    assert len(load(path)) == 20
    result = call("export", path, "--out", data / "layout")
    assert result.exit_code == 0, result.output
    assert len(list(data.glob("layout/pathfinder32/curv_contour_length_9/imgs/0/*.png"))) == 20


def test_generate_with_parameters_of_ones_own(data):
    (data / "parameters.json").write_text(OTHER.to_json())
    result = call("generate", "--parameters", data / "parameters.json", "--images", 3, "--out", data, "--workers", 1)
    assert result.exit_code == 0, result.output
    assert load(data / f"{OTHER.name}-generated-3-seed0.safetensors").parameters == OTHER


def test_statistics_are_printed_and_written(data):
    words = ("--images", 30, "--data", data, "--workers", 1, "--out", data / "new" / "statistics.md")
    result = call("statistics", "--only", "32-6", "--only", "64-6", *words)
    assert result.exit_code == 0, result.output
    text = (data / "new" / "statistics.md").read_text()
    assert "| pathfinder32-cl6 | 30 |" in text and "| pathfinder64-cl6 | 30 |" in text and "| original |" in text
    assert "| apart by |" in result.output


def test_shortcuts_are_printed_and_written(data, monkeypatch):
    monkeypatch.setattr(original, "SHORTCUTS", {(32, 6): (20, 0.58, 0.78)})
    words = ("--images", 50, "--data", data, "--workers", 1, "--out", data / "shortcuts.md")
    result = call("shortcuts", "--only", "32-6", *words)
    assert result.exit_code == 0, result.output
    text = (data / "shortcuts.md").read_text()
    assert text.count("| pathfinder32-cl6 | 50 |") == 2 and text.count("| pathfinder32-cl6 | 20 |") == 1


def test_all_cells_are_the_default():
    assert len(cli.chosen_parameters(None)) == 12


def test_picture_has_ours_above_the_real_ones(data):
    p = lra(32, 6)
    vectors = collect(p, 0, [draw(p, 0, index) for index in range(40)])
    real = strip(np.arange(8, dtype=np.uint8)[:, None, None] * np.ones((8, 32, 32), np.uint8))
    assert real.shape == (36, 274)
    Image.fromarray(real).save(data / "real.png")
    picture(vectors, data / "both.png", real=data / "real.png", enlarge=2)
    with Image.open(data / "both.png") as image:
        both = np.asarray(image)
    assert both.shape == (2 * (2 * 36 + 16), 2 * 274)
    assert np.array_equal(both[-72:][::2, ::2], real)
    result = call("picture", "--size", 32, "--contour", 6, "--data", data, "--workers", 1, "--out", data / "ours.png")
    assert result.exit_code == 0, result.output
    with Image.open(data / "ours.png") as image:
        assert image.size == (274, 36 + 16)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "--size", 48), "Error: images have sizes 32, 64, 128, 256, 512 and paths of 2 to 14"),
        (("generate", "--images", 1, "--out", "x.npz"), "Error: --out must be a folder, .*; got x.npz"),
        (("generate", "--images", 0), "Error: images must be at least 1; got 0"),
        (("generate", "--parameters", "nowhere.json"), "Error: nowhere.json must be .*; there is no such file"),
        (("export", "nowhere.safetensors"), "Error: there is no file nowhere.safetensors"),
        (("statistics", "--only", "hard"), "Error: --only must be size and contour length, as 128-14; got 'hard'"),
    ],
)
def test_mistakes_are_answered_in_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(*words)
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.output


def test_real_tiles_of_another_size_are_refused(data):
    Image.new("L", (100, 30)).save(data / "small.png")
    p = lra(32, 6)
    vectors = collect(p, 0, [draw(p, 0, index) for index in range(40)])
    with pytest.raises(ValueError, match=r"small.png must be an 8-bit grey PNG image of 274 x 36; got L \[100, 30\]"):
        picture(vectors, data / "none.png", real=data / "small.png")
