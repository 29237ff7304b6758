"""The models that ship: each is the file that its results are of, and still answers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.pathfinder.seeds import TEST_SEED
from experiments.pathfinder.vectors import join
from experiments.pathx import weights
from experiments.pathx.data.batches import drawn, pack_vectors
from experiments.pathx.evaluate import recipe_for, stage_for
from experiments.pathx.scoring import score
from experiments.pathx.supervision import of_model

SHIPPED = sorted((Path(__file__).parents[3] / "experiments" / "results" / "pathx").glob("*/model.safetensors"))
IMAGES = 12


def test_a_model_ships():
    assert SHIPPED


def test_what_a_model_began_from_ships_too_and_what_helped_is_told():
    notes = [weights.beside(path) for path in SHIPPED]
    by_hash = {note["sha256"]: note for note in notes}
    for note in notes:
        chain = [note]
        while chain[-1]["initial"] is not None:
            chain.append(by_hash[chain[-1]["initial"]["sha256"]])
        assert of_model(note)["labels"] == max(each["auxiliary"] for each in chain)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_what_ships_is_what_was_tested_and_answers_the_first_test_images(path):
    model, config, about = weights.load(path)
    config = replace(config, precision="fp32")
    said = weights.beside(path)
    assert about["cost"] == said["cost"]
    assert said["results"]
    for key, result in said["results"].items():
        size, contour, background = key.split("-")
        assert result["accuracy"] > 0.9
        if background == "keep":
            continue  # takes a CPU too long
        stage = stage_for(config, int(size), int(contour))
        recipe = recipe_for(config, stage)
        images = join([drawn(stage.size, stage.contour, TEST_SEED, index) for index in range(IMAGES)])
        packings = [pack_vectors(recipe, images, first, first + 4) for first in range(0, IMAGES, 4)]
        found = score(model, packings, recipe.layers, config, torch.device("cpu"))
        # They are always the same; of 97.7 % more than three would be wrong once in 7,000 times.
        assert int(found.right.sum()) >= IMAGES - 3
