import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from experiments.pathx import graph_steps, weights
from experiments.pathx.cli import app
from experiments.pathx.config import Config, as_dict, from_dict
from experiments.pathx.curricula import CURRICULA
from experiments.pathx.data.batches import make, recipe_of
from experiments.pathx.train import Run
from experiments.training.steps import Steps
from tests.experiments.lra.runs import same_bits
from tests.experiments.pathx.runs import STAGES, TINY, UNET, tensors

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole(stream, tmp_path_factory):
    run = Run(UNET, tmp_path_factory.mktemp("whole") / "run", stream)
    return run, run.train()


@pytest.mark.parametrize("background", ["drop", "keep"])
def test_its_batches_have_the_transformers_images_and_no_masks(background):
    stage = replace(STAGES[0], background=background, tokens=4096)
    own, other = (make(recipe_of(replace(each, curriculum=(stage,), registers=0), 0), 3) for each in (UNET, TINY))
    assert np.array_equal(own.ids, other.ids) and np.array_equal(own.labels, other.labels)
    assert own.tiles == own.orders == {}


def test_a_paused_run_goes_on_to_the_same_bits(whole, stream, tmp_path):
    for stop in (5, 7, 10):
        paused = Run(UNET, tmp_path, stream, resume=stop > 5)
        assert paused.train(pause=lambda step, stop=stop: step == stop) is None
    run = Run(UNET, tmp_path, stream, resume=True)
    said = run.train()
    assert same_bits(tensors(run), tensors(whole[0]))
    assert said["cost"]["images"] == whole[1]["cost"]["images"]
    assert same_bits(load_file(tmp_path / "model.safetensors"), whole[0].average.weights)


def test_by_the_command_line(tmp_path):
    stages = tmp_path / "stages.json"
    stages.write_text(json.dumps([asdict(replace(CURRICULA["smoke"][0], steps=2))]))
    words = ["train", f"--out={tmp_path / 'run'}", "--workers=0"]
    result = CliRunner().invoke(
        app, [*words, f"--curriculum={stages}", "--model=unet", "--width=64", "--validation-images=4", "--device=cpu"]
    )
    assert result.exit_code == 0, result.output
    _, config, about = weights.load(tmp_path / "run" / "model.safetensors")
    assert (config.model, about["cost"]["steps"]) == ("unet", 2)
    result = CliRunner().invoke(app, [*words, "--resume", "--model=attention"])
    assert result.exit_code == 2 and "--model was unet, got attention" in result.output


def test_larger_images_begin_with_a_runs_weights(whole, stream, tmp_path):
    path = str(whole[0].folder / "model.safetensors")
    config = replace(UNET, initial=path, curriculum=(replace(STAGES[0], size=64, tokens=4096, steps=1),))
    run = Run(config, tmp_path / "larger", stream)
    assert same_bits(run.model.state_dict(), load_file(path))
    assert run.train()["initial"]["sha256"] == whole[1]["sha256"]
    with pytest.raises(ValueError, match="must hold the weights of model attention; got unet"):
        Run(replace(TINY, initial=path), tmp_path / "other", stream)


def test_its_steps_are_never_recorded():
    recipe, gpu = recipe_of(UNET, 0), torch.device("cuda")
    model = weights.build(UNET)
    optimizer = torch.optim.SGD(model.parameters())
    assert UNET.recorded
    assert type(graph_steps.steps_of(model, optimizer, recipe, UNET, gpu)) is Steps


@pytest.mark.parametrize(
    "settings",
    [{"layers": "dense*2"}, {"heads": 2}, {"head_dim": 8}, {"dropout": 0.1}, {"intensity": "rows"},
     {"positions": "line"}, {"registers": 2}, {"auxiliary": 0.5}, {"auxiliary": 0.5, "hidden": 0.1},
     {"compiled": True}],
    ids=lambda settings: next(iter(settings)),
)  # fmt: skip
def test_settings_of_attention_are_refused(settings):
    with pytest.raises(ValueError, match=rf"{next(iter(settings))} must not be set with model unet, .* got "):
        Config(model="unet", **settings)


def test_masks_of_a_stage_are_refused_and_unknown_models():
    with pytest.raises(ValueError, match="must have no layers with model unet, which has no masks; got near:8,dense"):
        replace(UNET, curriculum=STAGES)
    with pytest.raises(ValueError, match="model must be one of attention, unet; got 'cnn'"):
        Config(model="cnn")


def test_settings_of_a_run_from_before_mean_attention():
    values = as_dict(TINY)
    del values["model"]
    assert from_dict(values) == TINY
    assert from_dict(as_dict(UNET)) == UNET
