from dataclasses import replace
from pathlib import Path

import pytest
import torch

import experiments
from experiments.measurements import read
from experiments.pathfinder.rendering import RENDERINGS
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


@pytest.mark.parametrize(
    ("model", "least"),
    [
        ("block-sparse", 98),
        ("unet", 98),
        ("block-sparse-pixel-labels", 98),
        ("path-256-block-sparse", 99),
        ("path-256-block-sparse-pixel-labels", 99),
    ],
)
def test_models_answer_in_any_rendering(model, least):
    _, measured = read(RESULTS / "models.jsonl")
    found = [each for each in measured if each.name.startswith("pathx/renderings/") and each.way == model]
    assert len(found) == len(RENDERINGS)
    assert all(each.settings["images"] == 1000 and each.value >= least for each in found)
    assert max(each.value for each in found) - min(each.value for each in found) <= 1


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


@pytest.mark.parametrize("note", [pytest.param(note, id=name) for name, note in NOTES])
def test_stored_accuracies_are_five_errors_above_what_traces_nothing(note):
    rules = dict(zip(map(str, table.SIZES), table.rule_row()[1:4], strict=True))
    for key, found in note["results"].items():
        size, contour, _ = key.split("-")
        if contour == "14":
            rule, error = (float(word) / 100 for word in rules[size].removesuffix(" %").split(" ± "))
            chance = max(error, (rule * (1 - rule) / found["images"]) ** 0.5)
            assert found["accuracy"] > rule + 5 * chance + 5 * found["error"], key


def test_the_stored_table_is_of_the_stored_results():
    assert (RESULTS / "table.md").read_text() == table.markdown(table.rows([RESULTS, WEIGHTS]))
