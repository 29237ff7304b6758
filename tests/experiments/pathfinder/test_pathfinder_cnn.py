import json

import pytest
import torch

from experiments.pathfinder.cnn import results
from experiments.pathfinder.cnn.network import SmallCNN
from experiments.pathfinder.parameters import LRA
from experiments.pathx import evaluate
from experiments.pathx.config import Stage


@pytest.mark.parametrize("size", [*LRA, 45])
def test_the_network_answers_and_each_of_its_last_places_sees_the_whole_image(size):
    model = SmallCNN(size).eval()
    assert model(torch.zeros(2, size, size, dtype=torch.uint8)).shape == (2, 2)
    image = torch.rand(1, 1, size, size, requires_grad=True)
    places = model.trunk(image)
    assert places.shape == (1, 64, 2, 2)
    places[0, :, 0, 0].sum().backward()
    assert (image.grad[0, 0, -1] != 0).any() and (image.grad[0, 0, :, -1] != 0).any()
    assert 100_000 < sum(weight.numel() for weight in model.parameters()) < 400_000


def test_a_stored_figure_is_told_beside_results(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "STORED", tmp_path)
    stage = Stage(size=128, contour=14, tokens=1024, lr=1e-3, steps=1)
    assert results.stored("pathfinder128-cl14") is None
    assert evaluate.baselines(stage) == ""
    rule = {"rule": "marker distance", "accuracy": 0.55, "error": 0.004, "images": 10_000, "by_distance": [0.5] * 4}
    figure = {
        "rule": "small 2-D CNN", "images": 20_000, "accuracy": 0.812, "error": 0.003,
        "by_distance": {"borders_px": [1.0, 2.0, 3.0], "accuracy": [0.8, 0.7, None, 0.6], "rules": [rule]},
    }  # fmt: skip
    (tmp_path / "cnn-pathfinder128-cl14.json").write_text(json.dumps(figure))
    assert results.as_rule(figure)["by_distance"] == [0.8, 0.7, None, 0.6]
    assert evaluate.baselines(stage) == "marker distance 55.0 %, small 2-D CNN 81.2 %"
