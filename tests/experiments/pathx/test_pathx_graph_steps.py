import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.pathx import graph_steps
from experiments.pathx.config import Config, Stage
from experiments.pathx.data.batches import make, most_blocks, most_images, recipe_of
from experiments.pathx.data.device_batch import on_device
from experiments.pathx.data.packing import pack
from experiments.pathx.data.static_packing import StaticPacking
from experiments.pathx.graph_steps import steps_of
from experiments.pathx.masks.relations import parse_layers
from experiments.pathx.model.classifier import PathModel
from experiments.training.cuda_graphs import GraphSteps
from experiments.training.optimizer import adamw
from experiments.training.steps import NO_LABEL, Steps
from tests.experiments.pathx.images import image
from tests.experiments.pathx.steps import compute_gradients
from tests.watched.waiting import waiting_raises

CPU = torch.device("cpu")
LAYERS = parse_layers("near:4,rows:1,columns:1,tiles:3,dense")
CONFIG = Config(precision="fp32", registers=1, auxiliary=0.5)
STAGE = Stage(size=32, contour=6, tokens=2048, lr=1e-3, steps=1)


def packed_of(*seeds, lit=0.4):
    images = [image(seed, lit=lit) for seed in seeds]
    traced = [(each > 100).astype(np.uint8) for each in images]
    return pack(images, [seed % 2 for seed in seeds], LAYERS, block=16, registers=1, blocks=40, pixel_labels=traced)


# Blocks and labels of the first, the fullest, must not stay behind.
PACKINGS = (packed_of(1, 2, 3, lit=0.6), packed_of(4, 5), packed_of(6, 7, 8, 9, lit=0.3))


def model_of():
    torch.manual_seed(2)
    return PathModel(depth=len(LAYERS), width=16, heads=2, mlp=16, registers=1, pixel_classes=3)


def static(packed, images=9, blocks=30):
    return StaticPacking(packed, CPU, LAYERS, 1, images=images, blocks=blocks)


def test_what_fills_up_the_tensors_changes_nothing():
    inputs = static(PACKINGS[0])
    model = model_of().double()
    for packed in (*PACKINGS, PACKINGS[0]):
        assert inputs.fits(packed)
        inputs.fill(packed)
        outcome = compute_gradients(model, inputs.on_device(), CONFIG)
        found = {name: weights.grad.clone() for name, weights in model.named_parameters()}
        expected = compute_gradients(model, on_device(packed, LAYERS, CPU, 1), CONFIG)
        assert torch.allclose(torch.stack(outcome[:2]), torch.stack(expected[:2]), rtol=1e-12)
        assert outcome.right == expected.right
        for name, weights in model.named_parameters():
            assert torch.allclose(found[name], weights.grad, rtol=0, atol=1e-13), name


def test_packings_that_do_not_fit_are_told():
    inputs = static(PACKINGS[1], images=3)
    assert inputs.fits(PACKINGS[1])
    assert not inputs.fits(PACKINGS[0])
    with pytest.raises(ValueError, match="room for 3 images of at most 30 blocks; got 4 of up to"):
        inputs.fill(PACKINGS[2])
    with pytest.raises(ValueError, match="--no-recorded"):
        static(PACKINGS[0], blocks=2)


def test_only_what_fills_up_has_no_label():
    assert (static(PACKINGS[0]).tensors["labels"] == NO_LABEL).tolist() == [False] * 3 + [True] * 6


@pytest.mark.parametrize("block", [32, 64, 256])
@pytest.mark.parametrize("background", ["drop", "keep"])
@pytest.mark.parametrize("registers", [0, 2])
def test_batches_fit_and_are_filled_up(background, registers, block):
    stage = replace(STAGE, background=background, tokens=8192 + 256)
    recipe = recipe_of(Config(curriculum=(stage,), layers="near:4", block=block, registers=registers), 0)
    for step in range(3):
        packed = make(recipe, step)
        assert len(packed.labels) <= most_images(recipe)
        assert packed.blocks.shape[1] <= most_blocks(recipe)
        used = (packed.blocks < packed.ids.size // block).sum(1)
        assert packed.ids.size // block - used.sum() < max(used.max(), 1024 // block + 1)
    assert (len(packed.labels) == most_images(recipe)) == (background == "keep")


def test_only_a_gpu_has_graphs():
    recipe = recipe_of(replace(CONFIG, curriculum=(STAGE,), layers="near:4"), 0)
    model = model_of()
    optimizer, gpu = adamw(model, 1e-3, 0.0), torch.device("cuda")
    assert type(steps_of(model, optimizer, recipe, CONFIG, CPU)) is Steps
    assert type(steps_of(model, optimizer, recipe, CONFIG, gpu)) is GraphSteps
    assert type(steps_of(model, optimizer, recipe, replace(CONFIG, recorded=False), gpu)) is Steps


def both_steps(monkeypatch, config):
    device = torch.device("cuda")
    monkeypatch.setattr(graph_steps, "most_images", lambda recipe: 9)
    monkeypatch.setattr(graph_steps, "most_blocks", lambda recipe: 30)
    recipe = replace(recipe_of(replace(config, curriculum=(STAGE,), layers="near:4"), 0), layers=LAYERS)
    model = model_of().to(device)
    models = model, copy.deepcopy(model)
    return models, [
        steps_of(each, adamw(each, 1e-3, 0.0), recipe, replace(config, recorded=is_recorded), device)
        for each, is_recorded in zip(models, (False, True), strict=True)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_recorded_steps_are_those_of_the_host(monkeypatch, compiled):
    models, (plain, steps) = both_steps(monkeypatch, CONFIG)
    if compiled:
        models[1].compile_layers()
    order = [PACKINGS[1], PACKINGS[0], PACKINGS[2], PACKINGS[1], PACKINGS[0]] * 3
    steps.prepare(order[0])
    graphs = {id(steps.captured[None]): steps.captured[None]}  # kept, so that no other has its address
    losses = []
    for packed in order:
        expected, found = plain(packed, 1e-3), steps(packed, 1e-3)
        losses.append([float(found.loss), float(expected.loss), float(found.auxiliary), float(expected.auxiliary)])
        graphs[id(steps.captured[None])] = steps.captured[None]
    assert len(graphs) > 1
    losses = torch.tensor(losses)
    assert torch.allclose(losses[:, 0], losses[:, 1], atol=2e-3)
    assert torch.allclose(losses[:, 2], losses[:, 3], atol=2e-3)
    assert losses[-1, 0] < losses[0, 0]
    for first, second in zip(models[0].parameters(), models[1].parameters()):
        assert torch.allclose(first, second, atol=5e-3)


@pytest.mark.gpu
def test_recorded_steps_have_the_same_bits_again(monkeypatch):
    first, second = (both_steps(monkeypatch, CONFIG)[1][1] for _ in range(2))
    first.prepare(PACKINGS[1])
    for steps in (first, second):
        for packed in PACKINGS * 2:
            steps(packed, 1e-3)
    for one, other in zip(first.model.parameters(), second.model.parameters()):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_no_recorded_step_waits_for_the_gpu(monkeypatch):
    _, (_, steps) = both_steps(monkeypatch, replace(CONFIG, precision="bf16"))
    steps(PACKINGS[0], 1e-3)
    steps(PACKINGS[1], 1e-3)
    with waiting_raises():
        for packed in PACKINGS:
            steps(packed, 1e-3)
