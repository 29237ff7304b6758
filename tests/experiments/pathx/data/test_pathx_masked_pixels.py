import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.pathx import table, weights
from experiments.pathx.config import Config, Stage
from experiments.pathx.data.batches import make, recipe_of
from experiments.pathx.data.device_batch import on_device
from experiments.pathx.data.masked_pixels import HIDDEN, hide
from experiments.pathx.data.packing import LEVELS, pack, stack
from experiments.pathx.data.stream import Stream
from experiments.pathx.losses import asked_in, losses
from experiments.pathx.masks.relations import parse_layers
from experiments.pathx.supervision import described, of_model, of_run
from experiments.pathx.train import Run
from experiments.training.optimizer import adamw
from tests.experiments.pathx.images import image
from tests.experiments.pathx.steps import training_step

LAYERS = parse_layers("near:4,dense")
IMAGES = [image(0), image(1, lit=0.15), image(2, lit=0.7)]
STAGE = Stage(size=32, contour=6, tokens=1088, lr=3e-3, steps=3, warmup=1)
CONFIG = Config(
    curriculum=(STAGE,), layers="near:6,dense", block=32, width=16, heads=2, mlp=16, auxiliary=1.0, hidden=0.2,
    answers=0.0, precision="fp32", device="cpu", log_every=1, validate_every=100, validation_images=4,
)  # fmt: skip


def packed(form=pack):
    return form(IMAGES, [1, 0, 1], LAYERS, block=32, registers=1)


@pytest.mark.parametrize("form", [pack, stack])
def test_a_share_of_the_drawn_pixels_is_hidden_and_all_levels_are_kept(form):
    before = packed(form)
    after = hide(before, 0.25, np.random.default_rng(0))
    drawn = (before.ids > 0) & (before.ids < LEVELS)
    changed = after.ids != before.ids
    assert changed.sum() == round(0.25 * drawn.sum())
    assert drawn[changed].all()
    assert (after.ids[changed] == HIDDEN).all()
    assert (after.pixel_labels[drawn] == before.ids[drawn]).all()
    assert (after.pixel_labels[~drawn] == 0).all()
    assert before.pixel_labels is None
    one = hide(before, 1e-9, np.random.default_rng(0))
    assert (one.ids != before.ids).sum() == 1


@torch.no_grad()
@pytest.mark.parametrize("form", [pack, stack])
def test_hidden_pixels_alone_are_asked_for(form):
    before = packed(form)
    batch = on_device(hide(before, 0.25, np.random.default_rng(0)), LAYERS, torch.device("cpu"), 1)
    config = replace(CONFIG, registers=1)
    asked = torch.from_numpy(before.ids) != batch.ids
    assert torch.equal(asked_in(batch, hidden=True), asked)
    assert asked_in(batch, hidden=False).sum() == ((before.ids > 0) & (before.ids < LEVELS)).sum() - asked.sum()
    model = weights.build(config).eval()
    assert model.tracer.out_features == LEVELS
    torch.nn.init.zeros_(model.tracer.weight)
    torch.nn.init.zeros_(model.tracer.bias)
    _, outcome = losses(model, batch, config)
    assert float(outcome.auxiliary) == pytest.approx(np.log(LEVELS))
    labels = torch.where(asked, batch.pixel_labels.long(), 7 * (batch.pixel_labels > 0))
    changed = replace(batch, pixel_labels=labels.to(torch.uint8))
    torch.nn.init.normal_(model.tracer.weight)
    assert float(losses(model, batch, config)[1].auxiliary) == float(losses(model, changed, config)[1].auxiliary)


def test_steps_without_answers_learn_levels_and_leave_the_head_alone():
    levels = [np.where(each > 0, 40 + each // 200 * 100, 0).astype(np.uint8) for each in IMAGES]
    batch = on_device(
        hide(pack(levels, [1, 0, 1], LAYERS, block=32), 0.2, np.random.default_rng(1)), LAYERS, torch.device("cpu")
    )
    model = weights.build(CONFIG)
    head = [parameter.clone() for parameter in model.head.parameters()]
    optimizer = adamw(model, 3e-3, 0.0)
    outcomes = [training_step(model, optimizer, batch, CONFIG, 3e-3) for _ in range(60)]
    assert outcomes[-1].auxiliary < 0.3 * outcomes[0].auxiliary
    assert all(torch.equal(*pair) for pair in zip(head, model.head.parameters()))


def test_batches_hide_the_same_pixels_every_time_and_others_at_every_step():
    recipe = recipe_of(CONFIG, 0)
    first, again, second = make(recipe, 0), make(recipe, 0), make(recipe, 1)
    assert np.array_equal(first.ids, again.ids)
    assert (first.ids == HIDDEN).any()
    assert not np.array_equal(first.ids, second.ids)
    plain = make(replace(recipe, hidden=0.0), 0)
    assert not (plain.ids == HIDDEN).any()
    assert all(np.array_equal(*pair) for pair in zip(plain.tiles["near:6"], first.tiles["near:6"]))
    with Stream(0) as stream:
        assert not any((each.ids == HIDDEN).any() for each in stream.validation(recipe, 4)())


def test_a_run_begins_with_what_was_pretrained_and_says_so(tmp_path):
    with Stream(0) as stream:
        before = Run(CONFIG, tmp_path / "before", stream).train()
        assert before["helped"] == {"labels": 0.0, "hidden": 0.2}
        initial = str(tmp_path / "before" / "model.safetensors")
        config = replace(CONFIG, hidden=0.0, answers=1.0, auxiliary=0.0, initial=initial)
        after = Run(config, tmp_path / "after", stream).train()
    assert after["helped"] == {"labels": 0.0, "hidden": 0.2}
    note = after | {"results": {"128-14-drop": {"accuracy": 0.9, "error": 0.01, "layers": config.layers}}}
    (tmp_path / "after" / "model.json").write_text(json.dumps(note))
    row = table.rows([tmp_path])[1]
    assert row[4] == "class, 20 % of the pixels hidden and named"


def test_labels_of_an_earlier_run_are_described():
    labelled = {"helped": {"labels": 0.5, "hidden": 0.0}}
    plain = Config()
    assert of_run(plain, None) == {"labels": 0.0, "hidden": 0.0}
    assert described(of_run(plain, None)) == ""
    assert described(of_run(plain, labelled)) == "pixel labels (weight 0.5)"


@pytest.mark.parametrize(
    ("about", "labels", "words"),
    [
        ({"auxiliary": 0.5, "initial": None}, 0.5, "pixel labels (weight 0.5)"),
        ({"auxiliary": 0.0, "initial": None}, 0.0, ""),
        ({"auxiliary": 0.5, "initial": {"sha256": "x"}}, 0.5, "pixel labels (weight 0.5)"),
        (
            {"auxiliary": 0.0, "initial": {"sha256": "x"}},
            None,
            "perhaps pixel labels (of an earlier run, which does not say)",
        ),
        ({"auxiliary": 0.0, "initial": {"helped": {"labels": 0.1, "hidden": 0.0}}}, 0.1, "pixel labels (weight 0.1)"),
    ],
)
def test_files_from_before_this_was_written_tell_what_they_know(about, labels, words):
    found = of_model(about)
    assert found == {"labels": labels, "hidden": 0.0}
    assert described(found) == words
    assert of_run(Config(), {"sha256": "x", "runs": 1})["labels"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 1.0}, "hidden must be at least 0 and below 1; got 1.0"),
        ({"auxiliary": 0.0}, "auxiliary must be more than 0"),
        ({"auxiliary": 0.0, "hidden": 0.0}, "auxiliary must be more than 0"),
        ({"answers": -1.0}, "answers must be at least 0"),
    ],
)
def test_settings_that_mean_nothing(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)
