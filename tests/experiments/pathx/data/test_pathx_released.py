import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import experiments
from experiments.pathfinder.draw import draw
from experiments.pathfinder.parameters import FOLDS, lra
from experiments.pathfinder.release import export
from experiments.pathfinder.released import samples_in
from experiments.pathfinder.vectors import collect
from experiments.pathx import weights
from experiments.pathx.cli import app
from experiments.pathx.config import from_dict
from experiments.pathx.data.batches import make, pack_released, recipe_of
from experiments.pathx.data.released import folder_of_fold, image_of, samples_of, title
from experiments.pathx.data.stream import Stream
from experiments.pathx.evaluate import Evaluation, stage_for
from experiments.pathx.train import Run
from tests.experiments.pathx.runs import STAGES, TINY

ROOT = Path(experiments.__file__).parents[1]
RELEASED = ROOT / "tests" / "fixtures" / "pathfinder"
PATHX = ROOT / "experiments" / "weights" / "path-x" / "model.safetensors"
BY_EYE = [1, 0, 1, 0, 1, 1, 1, 1]
LABEL_FREE = replace(TINY, auxiliary=0.0, registers=0)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release")
    for contour in (6, 9):
        parameters = lra(32, contour)
        export(collect(parameters, 5, [draw(parameters, 5, index) for index in range(40)]), folder)
    return folder


def test_the_stored_model_answers_the_released_tiles():
    model, config, _ = weights.load(PATHX)
    config = replace(config, precision="fp32")
    stage = replace(stage_for(config, 128, 14), tokens=8192)
    place = folder_of_fold(RELEASED, 128, 14)
    with Stream(0) as stream:
        evaluation = Evaluation(model, config, stage, stream, torch.device("cpu"))
        found = evaluation.scores(pack_released, place, "all", images=len(BY_EYE))
    assert found.labels.tolist() == BY_EYE
    assert found.right.all()


def test_batches_are_training_images_and_depend_on_seed_and_step_alone(exported):
    config = replace(LABEL_FREE, release=str(exported), renderings=False, floor=1)
    recipe = recipe_of(config, 0)
    batch, again = make(recipe, 4), make(recipe, 4)
    assert np.array_equal(batch.ids, again.ids) and not np.array_equal(batch.ids, make(recipe, 5).ids)
    known = {image_of(sample, 32).tobytes(): sample.label for sample in training(exported, 6)}
    for place, label in enumerate(batch.labels.tolist()):
        rows = batch.blocks[place][batch.blocks[place] < batch.ids.size // batch.block]
        image = np.zeros((32, 32), np.uint8)
        ids, y, x = (each[0].reshape(-1, batch.block)[rows] for each in (batch.ids, batch.y, batch.x))
        is_pixel = ids >= 0
        image[y[is_pixel], x[is_pixel]] = ids[is_pixel]
        assert known[image.tobytes()] == label


def training(folder, contour):
    return samples_of(folder_of_fold(folder, 32, contour), "training")


def test_the_splits_share_no_image_and_are_those_of_s4(exported):
    place = folder_of_fold(exported, 32, 6)
    parts = [samples_of(place, split) for split in ("training", "validation", "test")]
    assert [len(part) for part in parts] == [32, 4, 4]
    assert {sample for part in parts for sample in part} == set(samples_of(place, "all"))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(42)).tolist()
    everything = samples_in(place)
    assert list(parts[2]) == [everything[row] for row in order[36:]]


def test_a_run_on_a_release_gives_the_same_bits_when_it_is_paused(exported, tmp_path):
    config = replace(LABEL_FREE, release=str(exported), dropout=0.0)
    with Stream(0) as stream:
        whole = Run(config, tmp_path / "whole", stream)
        said = whole.train()
        Run(config, tmp_path / "paused", stream).train(pause=lambda step: step == 5)
        saved = from_dict(json.loads((tmp_path / "paused" / "config.json").read_text())["config"])
        resumed = Run(saved, tmp_path / "paused", stream, resume=True)
        resumed.train()
    assert said["cost"]["images"] > 0
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_the_command_tests_on_a_release_and_says_what_it_was(exported, tmp_path):
    config = replace(LABEL_FREE, curriculum=STAGES[:1])
    model = tmp_path / "model.safetensors"
    weights.save(model, weights.build(config), config, {"cost": {}, "auxiliary": 0.0, "initial": None})
    out = tmp_path / "out.json"
    arguments = ["evaluate", str(model), f"--release={exported}", "--workers=0", "--device=cpu", f"--out={out}"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["images"] == 4 and found["test_set_sha256"] is None
    assert found["task"] == "pathfinder32, curv_baseline, generated, in the layout of the release, test images"
    for more, message in (
        (["--store"], "--store and --record keep results of test sets"),
        ([f"--record={tmp_path}/a.jsonl"], "--store and --record keep results of test sets"),
        (["--renderings"], "--renderings draws images anew"),
        (["--split=half"], "split must be one of test, validation, training, all; got 'half'"),
        (["--contour=14"], f"holds no pathfinder32/{FOLDS[14]}"),
    ):
        result = CliRunner().invoke(app, arguments + more)
        assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_a_release_has_no_pixel_labels_and_few_images_have_no_splits(exported, tmp_path):
    with pytest.raises(ValueError, match="auxiliary must be 0 with a release"):
        replace(TINY, release=str(exported))
    with pytest.raises(ValueError, match="three splits need at least 10 images; got 8; pass --split all"):
        samples_of(folder_of_fold(RELEASED, 128, 14), "test")
    shutil.copytree(RELEASED / "pathfinder128", tmp_path / "pathfinder128")
    fold = folder_of_fold(tmp_path, 128, 14)
    assert title(fold, 128, "all") == "pathfinder128, curv_contour_length_14, released, all images"
    (fold / "imgs" / "0" / "sample_3.png").write_bytes(b"")
    assert len(samples_of(fold, "all")) == 7
