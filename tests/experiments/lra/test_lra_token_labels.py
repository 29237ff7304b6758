import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from experiments.lra.config import Config
from experiments.lra.data.augment import Turning
from experiments.lra.data.batches import collate, evaluation_batches, training_batches
from experiments.lra.data.listops import generator, grammar
from experiments.lra.data.order import Order
from experiments.lra.graph_steps import padded_to_longest, steps_of
from experiments.lra.losses import forward, losses
from experiments.lra.model.build import build_model, build_optimizer
from experiments.lra.report import print_result
from experiments.lra.scoring import score
from experiments.lra.table.accuracy import collect
from experiments.lra.tasks import TASKS, load
from experiments.lra.token_labels import token_labels_of
from experiments.lra.train import Run
from experiments.pathfinder.generate import Settings, generate
from experiments.pathfinder.owners import marker_counts
from experiments.pathfinder.parameters import lra
from experiments.pathfinder.release import export
from experiments.pathfinder.render import render
from experiments.pathfinder.vectors import load as load_vectors
from experiments.training.steps import NO_LABEL
from sparseflash import masks
from tests.experiments.lra.models import training_step
from tests.experiments.lra.runs import TINY
from tests.experiments.lra.runs import TINY_IMAGES as CONFIG

CPU = torch.device("cpu")
COUNT = 60


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return generate(Settings(lra(32, 14), COUNT), tmp_path_factory.mktemp("images"), workers=1)


@pytest.fixture(scope="module")
def data(path):
    return load("pathfinder32", path)


def batch_of(data, count=4, config=CONFIG, **more):
    return collate(data.train, np.arange(count), config.shape, token_labels=token_labels_of(data), **more)


def counts_by_image(path):
    vectors = load_vectors(path)
    images, counts = render(vectors).reshape(COUNT, -1), marker_counts(vectors).reshape(COUNT, -1).astype(np.int64)
    return {image.tobytes(): np.where(image > 0, each, NO_LABEL) for image, each in zip(images, counts, strict=True)}


@pytest.mark.parametrize("background", ["drop", "keep"])
def test_every_drawn_pixel_has_the_class_of_its_curve(path, data, background):
    config = replace(CONFIG, background=background)
    expected = counts_by_image(path)
    batch = batch_of(data, len(data.train), config)
    connected = []
    for row in range(len(data.train)):
        classes = expected[data.train.sequence(row).tobytes()]
        if background == "drop":
            classes = classes[classes != NO_LABEL]
        count = int(batch.lengths[row])
        assert batch.token_labels[row, :count].tolist() == classes.tolist()
        assert (batch.token_labels[row, count:] == NO_LABEL).all()
        connected.append(2 in classes)
    assert batch.labels.tolist() == [int(each) for each in connected]


def test_classes_turn_with_their_pixels(path, data):
    expected = counts_by_image(path)
    turning = Turning("square", 32, 3, 8)
    order = Order(len(data.train), 8, 0)
    batch = next(training_batches(data.train, CONFIG.shape, order, 5, turning, token_labels_of(data)))
    for place, (row, way) in enumerate(zip(order.rows(5), turning.ways(5), strict=True)):
        classes = np.rot90(expected[data.train.sequence(row).tobytes()].reshape(32, 32), way % 4)
        classes = (classes[:, ::-1] if way >= 4 else classes).reshape(-1)
        found = np.full(1024, NO_LABEL)
        count = int(batch.lengths[place])
        found[batch.places[place, :count]] = batch.token_labels[place, :count]
        assert (found == classes).all()
    assert len(set(turning.ways(5) % 4)) > 1


def test_the_loss_is_that_of_drawn_pixels_alone(data):
    model = build_model(CONFIG, data.task, masks.butterfly(1024, block=64)).train()
    batch = batch_of(data)
    _, outcome = losses(model, batch, CONFIG)
    assert forward(model, batch, CONFIG).shape == (4, 2)
    counts = model(batch.ids, batch.lengths, batch.places)[1]
    each = [
        -torch.log_softmax(counts[row, token], -1)[batch.token_labels[row, token]]
        for row in range(4)
        for token in range(int(batch.lengths[row]))
    ]
    assert outcome.auxiliary.item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-5)
    padded = padded_to_longest(batch, CONFIG.shape)
    assert padded.ids.shape[1] > batch.ids.shape[1]
    for found, expected in zip(losses(model, padded, CONFIG)[1], outcome, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_weight_of_the_loss_is_that_of_its_gradient(data):
    batch = batch_of(data)

    def gradients(weight):
        config = replace(CONFIG, auxiliary=weight)
        model = build_model(config, data.task, masks.butterfly(1024, block=64)).double()
        training_step(model, build_optimizer(config, model), batch, replace(config, clip=0.0), lr=0.0)
        return model.tracer.weight.grad, model.embedding.weight.grad

    (tracer_one, embedding_one), (tracer_three, embedding_three) = gradients(1.0), gradients(3.0)
    torch.testing.assert_close(tracer_three, 3 * tracer_one)
    assert not torch.allclose(embedding_three, 3 * embedding_one)


def test_tests_ask_for_answers_alone(data):
    model = build_model(CONFIG, data.task, masks.butterfly(1024, block=64))
    (batch,) = evaluation_batches(data.test, CONFIG.shape, 6, 6)
    assert batch.token_labels is None
    assert score(model, [batch], CONFIG, CPU).examples == 6
    assert torch.is_tensor(model(batch.ids, batch.lengths, batch.places))


def test_pixels_are_learned(data):
    config = replace(CONFIG, width=32, heads=2, depth=2, lr=3e-3)
    model = build_model(config, data.task, masks.butterfly(1024, block=64))
    optimizer = build_optimizer(config, model)
    batch = batch_of(data, 4)
    found = [training_step(model, optimizer, batch, config, config.lr).auxiliary.item() for _ in range(20)]
    assert found[-1] < 0.7 * found[0]


def test_a_run_logs_both_losses_and_goes_on_as_if_it_had_not_stopped(data, tmp_path):
    whole = Run(CONFIG, data, tmp_path / "whole")
    metrics = whole.train()
    assert all(record["auxiliary"] > 0 for record in whole.log.of_kind("train"))
    assert metrics["config"]["auxiliary"] == 0.5
    paused = Run(CONFIG, data, tmp_path / "paused")
    assert paused.train(pause=lambda step: step == 2) is None
    resumed = Run(CONFIG, data, tmp_path / "paused", resume=True)
    resumed.train()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


def test_a_run_without_labels_begins_with_the_encoder_of_one_with_them(data, tmp_path):
    traced = Run(CONFIG, data, tmp_path / "traced")
    traced.train()
    plain = Run(replace(CONFIG, auxiliary=0.0, initial=str(tmp_path / "traced")), data, tmp_path / "plain")
    assert torch.equal(plain.model.head[0].weight, traced.model.head[0].weight)
    assert not hasattr(plain.model, "tracer")
    metrics = plain.train()
    assert "auxiliary" not in plain.log.of_kind("train")[-1]
    third = Run(replace(plain.config, initial=str(tmp_path / "plain")), data, tmp_path / "third")
    metrics_of_third = third.train()
    assert metrics["token_labels"] and metrics_of_third["token_labels"]
    console = Console(record=True, width=120, file=io.StringIO())
    print_result(console, metrics_of_third, tmp_path)
    assert "pixel labels in training" in console.export_text()


def test_images_of_the_release_do_not_tell(path, tmp_path):
    export(load_vectors(path), tmp_path)
    released = load("pathfinder32", tmp_path)
    plain = replace(CONFIG, auxiliary=0.0)
    before = Run(plain, released, tmp_path / "run")
    before.train()
    with pytest.raises(ValueError, match="auxiliary needs data that say which curve each pixel lies on"):
        Run(CONFIG, released, tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "metrics.json").is_file()


def test_only_listops_and_pathfinder_have_classes_of_tokens():
    with pytest.raises(ValueError, match=r"auxiliary=0\.5 is for ListOps and Pathfinder; the task is image"):
        Config(task="image", auxiliary=0.5)
    with pytest.raises(ValueError, match=r"auxiliary=0\.5 needs objective=classify; got denoise"):
        replace(CONFIG, objective="denoise")
    with pytest.raises(ValueError, match="auxiliary must be at least 0; got -1"):
        replace(CONFIG, auxiliary=-1)
    assert not TASKS["image"].token_classes


def test_listops_labels_are_the_values_of_all_expressions(tmp_path):
    folder = generator.generate(generator.Settings(100, 400, 64, 4, 4), tmp_path, workers=1)
    data = load("listops", folder)
    config = replace(TINY, auxiliary=1.0, max_tokens=2000)
    batch = collate(data.train, np.arange(len(data.train)), config.shape, token_labels=token_labels_of(data))
    operators = 0
    for ids, labels in zip(batch.ids[:, 1:].tolist(), batch.token_labels[:, 1:].tolist(), strict=True):
        for place, token in enumerate(ids):
            if not 1 + grammar.MIN <= token < 1 + grammar.CLOSE:
                assert labels[place] == NO_LABEL
                continue
            end, depth = place, 0
            while True:
                depth += (1 + grammar.MIN <= ids[end] < 1 + grammar.CLOSE) - (ids[end] == 1 + grammar.CLOSE)
                end += 1
                if depth == 0:
                    break
            assert labels[place] == grammar.evaluate([each - 1 for each in ids[place:end]])
            operators += 1
    assert operators > 5 * len(data.train)
    assert (batch.token_labels[:, 0] == NO_LABEL).all()
    assert batch.token_labels[:, 1].tolist() == batch.labels.tolist()
    run = Run(replace(TINY, auxiliary=1.0, steps=2), data, tmp_path / "run")
    metrics = run.train()
    assert metrics["token_labels"] and run.log.of_kind("train")[-1]["auxiliary"] > 0
    console = Console(record=True, width=120, file=io.StringIO())
    print_result(console, metrics, tmp_path)
    assert "values of expressions in training" in console.export_text()
    (found,) = collect(tmp_path / "run")
    assert found.helps == "values of expressions in training, averaged weights"


@pytest.mark.gpu
def test_recorded_steps_learn_pixels_as_the_hosts_do(data):
    device = torch.device("cuda")
    config = replace(CONFIG, depth=2, width=32, heads=2, precision="fp32")
    models = [build_model(config, data.task, masks.butterfly(1024, block=64).to(device)) for _ in range(2)]
    plain, recorded = (
        steps_of(model, build_optimizer(config, model), replace(config, recorded=is_recorded), device)
        for is_recorded, model in zip((False, True), models, strict=True)
    )
    for step in range(4):
        batch = collate(data.train, np.arange(4 * step, 4 * step + 4), config.shape, token_labels=token_labels_of(data))
        expected, found = plain(batch, 1e-3), recorded(batch, 1e-3)
        assert found.loss.item() == pytest.approx(expected.loss.item(), abs=1e-3)
        assert found.auxiliary.item() == pytest.approx(expected.auxiliary.item(), abs=1e-3)
        assert found.auxiliary.item() > 0
    assert forward(models[1].eval(), batch.to(device), config).shape == (4, 2)
