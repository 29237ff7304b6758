from dataclasses import replace
from pathlib import Path

import pytest
import torch

import experiments
from experiments.pathfinder.seeds import TEST_SEED
from experiments.pathfinder.vectors import join
from experiments.pathx import supervision, table, weights
from experiments.pathx.data.batches import drawn, pack_vectors
from experiments.pathx.evaluate import recipe_for, stage_for
from experiments.pathx.scoring import score

RESULTS = Path(experiments.__file__).parent / "results" / "pathx"
WEIGHTS = RESULTS.parents[1] / "weights"
STORED = sorted(WEIGHTS.glob("path-*/model.safetensors"))
NOTES = [each for place in (RESULTS, WEIGHTS) for each in table.found_below(place)]
IMAGES = 8


def test_the_best_model_of_each_task_is_stored_and_no_other():
    """Trained in drawn renderings from class labels alone, if possible. Path-512's model takes minutes to train from
    Path-256's."""
    best = {}
    for name, note in NOTES:
        if "-seed" in name:
            continue
        without_labels = supervision.of_model(note)["labels"] == 0
        for key, result in note["results"].items():
            size, contour, _ = key.split("-")
            assert contour == "14"
            is_drawn = result.get("renderings") == "drawn"
            found = is_drawn, without_labels, result["accuracy"], name
            best[size] = max(best.get(size, (False, False, 0.0, "")), found)
    assert best.keys() == {"128", "256", "512"}
    assert {weights.beside(path)["run"] for path in STORED} == {best[size][-1] for size in ("128", "256")}


def test_the_runs_that_a_model_began_from_have_results_too_and_their_supervision_is_named():
    notes = [note for _, note in NOTES]
    by_hash = {note["sha256"]: note for note in notes}
    for note in notes:
        chain = [note]
        while chain[-1]["initial"] is not None:
            chain.append(by_hash[chain[-1]["initial"]["sha256"]])
        assert supervision.of_model(note)["labels"] == max(each["auxiliary"] for each in chain)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.parent.name)
def test_a_stored_model_is_the_tested_one_and_answers_the_first_test_images(path):
    model, config, about = weights.load(path)
    config = replace(config, precision="fp32")
    note = weights.beside(path)
    assert about["cost"] == note["cost"]
    (key,) = note["results"]
    size, contour, background = key.split("-")
    assert background == "drop"
    stage = stage_for(config, int(size), int(contour))
    recipe = recipe_for(config, stage)
    images = join([drawn(stage.size, stage.contour, TEST_SEED, index) for index in range(IMAGES)])
    packings = [pack_vectors(recipe, images, first, first + 4) for first in range(0, IMAGES, 4)]
    found = score(model, packings, recipe.layers, config, torch.device("cpu"))
    # A model that guesses would pass once in 28 times.
    assert int(found.right.sum()) >= IMAGES - 1


def test_the_stored_table_is_of_the_stored_results():
    assert (RESULTS / "table.md").read_text() == table.markdown(table.rows([RESULTS, WEIGHTS]))
