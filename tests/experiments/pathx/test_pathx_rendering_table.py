import json
from functools import partial

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from experiments.pathfinder import testset
from experiments.pathfinder.plain_render import plain_render
from experiments.pathfinder.rendering import RENDERINGS
from experiments.pathfinder.vectors import load as load_vectors
from experiments.pathx import cli, rendering_table, weights
from experiments.pathx.config import Config, Stage
from experiments.pathx.data.batches import recipe_of
from experiments.pathx.data.stream import Stream
from experiments.pathx.evaluate import Evaluation
from experiments.training import progress_bar
from tests.experiments.pathx.runs import TINY

IMAGES = 6


@pytest.fixture
def tests(tmp_path, monkeypatch):
    monkeypatch.setattr(testset, "IMAGES", 20)
    monkeypatch.setattr(cli, "IMAGES", 20)
    hashes = tmp_path / "hashes.json"
    monkeypatch.setattr(cli, "test_set", partial(testset.test_set, hashes=hashes))
    return testset.test_set(32, 9, tmp_path / "data", workers=1, record=True, hashes=hashes)


class Bright(torch.nn.Module):
    def forward(self, batch):
        levels = batch.ids.clamp(min=0).double()
        mean = torch.stack([levels[0].reshape(-1, batch.block)[blocks[blocks < len(levels[0]) // batch.block]].mean()
                            for blocks in batch.blocks])  # fmt: skip
        return torch.stack([torch.zeros_like(mean), mean - 125.0], 1), None


def test_every_rendering_has_a_row_of_the_same_images(tests):
    config = Config(**{**vars(TINY), "block": 32, "registers": 0})
    stage = Stage(size=32, contour=9, tokens=4096, lr=1.0, steps=1)
    reported, answered = [], []
    with Stream(0) as stream:
        evaluation = Evaluation(Bright(), config, stage, stream, torch.device("cpu"))
        found = rendering_table.table(evaluation, tests, IMAGES, report=reported.append, progress=answered.append)
    assert answered == sorted(answered) and answered[-1] == IMAGES * len(RENDERINGS)
    assert set(answered) >= {IMAGES * rows for rows in range(1, len(RENDERINGS) + 1)}
    assert [row["rendering"] for row in found["rows"]] == list(RENDERINGS) and reported == found["rows"]
    labels = load_vectors(tests).labels[:IMAGES]
    for row in found["rows"]:
        assert row["images"] == IMAGES and row["connected"] == labels.sum()
        assert row["accuracy"] == row["right"] / IMAGES
    accuracies = [row["accuracy"] for row in found["rows"]]
    assert found["worst_below_best"] == max(accuracies) - min(accuracies)
    said = {row["rendering"]: row["said_connected"] for row in found["rows"]}
    assert said["brightness 0.85"] < said["brightness 1.1"]
    text = rendering_table.markdown(found)
    assert text.count("\n| ") == len(RENDERINGS) + 1 and "levels below 32 left out" in text


def test_images_are_those_of_the_second_renderer(tests):
    recipe = recipe_of(Config(**{**vars(TINY), "floor": 1}), 1)
    vectors = load_vectors(tests)
    for name, rendering in RENDERINGS.items():
        packed = rendering_table.pack_rendered(recipe, tests, name, 2, 4)
        images = [plain_render(vectors, index, rendering, np.random.default_rng(index)) for index in (2, 3)]
        live = packed.ids[(packed.ids > 0) & (packed.ids < 256)]
        assert sorted(live.tolist()) == sorted(level for image in images for level in image[image > 0].tolist())


def test_the_command_prints_and_stores_the_table(tests, tmp_path, monkeypatch):
    monkeypatch.setattr(progress_bar, "SECONDS", 0)
    model = tmp_path / "model.safetensors"
    weights.save(model, weights.build(TINY), TINY, {"cost": {}, "auxiliary": 0.0, "initial": None})
    arguments = ["evaluate", str(model), "--renderings", f"--images={IMAGES}", f"--data={tests.parent}", "--workers=0",
                 "--device=cpu", "--store", f"--out={tmp_path / 'out.json'}"]  # fmt: skip
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    for name in RENDERINGS:
        assert f"| {name} | " in result.output
    assert f"Testing: {IMAGES} of {IMAGES * len(RENDERINGS)}" in result.output.splitlines()
    stored = json.loads((tmp_path / "renderings.json").read_text())
    assert stored == json.loads((tmp_path / "out.json").read_text())
    assert (tmp_path / "renderings.md").read_text() == rendering_table.markdown(stored)
