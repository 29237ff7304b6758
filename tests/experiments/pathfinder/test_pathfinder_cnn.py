import json
from dataclasses import asdict, replace
from itertools import islice

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from experiments.pathfinder import cli
from experiments.pathfinder.cnn import results
from experiments.pathfinder.cnn.config import Config
from experiments.pathfinder.cnn.images import Batch, fresh, repeated, turned
from experiments.pathfinder.cnn.network import SmallCNN
from experiments.pathfinder.cnn.report import report
from experiments.pathfinder.cnn.run import Source, train
from experiments.pathfinder.cnn.train import Training, answers
from experiments.pathfinder.draw import draw
from experiments.pathfinder.parameters import LRA, lra
from experiments.pathfinder.render import render
from experiments.pathfinder.seeds import TEST_SEED, image_index, training_seed
from experiments.pathfinder.vectors import collect, save
from experiments.pathx import evaluate, table
from experiments.pathx.config import Stage
from experiments.training.prefetch import Prefetcher

CPU = torch.device("cpu")
EASY = lra(32, 6)
TINY = Config(width=2, batch=4, steps=3, minutes=None)


def some(images, seed=1):
    return collect(EASY, seed, [draw(EASY, seed, index) for index in range(images)])


def figure(size=32, contour=14, accuracy=0.75):
    rule = {"rule": "marker distance", "accuracy": 0.55, "error": 0.004, "images": 10_000, "by_distance": [0.5] * 4}
    return {
        "rule": results.RULE, "images_of": lra(size, contour).name, "size": size, "contour": contour, "images": 20_000,
        "accuracy": accuracy, "error": 0.003, "weights": 123_456, "trained_on": "fresh images", "device": "X",
        "by_distance": {"borders_px": [1.0, 2.0, 3.0], "accuracy": [0.8, 0.7, None, 0.6], "rules": [rule]},
        "cost": {"steps": 9, "images": 576, "different_images": 64, "seconds": 90.0, "images_per_s": 6.4},
        "last_training": {"accuracy": 0.7}, "versions": {"torch": "2"}, "cores": 2, "command": "python -m ...",
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "STORED", tmp_path)
    return tmp_path


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


def test_fresh_batches_are_those_of_the_training_seed():
    with Prefetcher(0) as stream:
        first, second = islice(fresh(EASY, 5, 3, stream, CPU), 2)
    seed = training_seed(5)
    vectors = collect(EASY, seed, [draw(EASY, seed, image_index(0, 1, place)) for place in range(3)])
    assert np.array_equal(second.images.numpy(), render(vectors))
    assert second.labels.tolist() == vectors.labels.tolist()
    assert not torch.equal(first.images, second.images)


def test_a_file_is_seen_in_new_orders_turned_with_its_own_labels():
    vectors = some(9)
    originals = torch.from_numpy(render(vectors))
    labels = dict(enumerate(vectors.labels.tolist()))
    seen = []
    for images, said in islice(repeated(vectors, 0, 4, CPU), 4):
        for image, label in zip(images, said.tolist()):
            [number] = [
                n for n in range(9) for way in range(8) if torch.equal(turned(originals[n : n + 1], way)[0], image)
            ]
            assert labels[number] == label
            seen.append(number)
    assert len(set(seen[:8])) == len(set(seen[8:])) == 8
    assert seen[:8] != seen[8:]
    assert len({turned(originals[:1], way).numpy().tobytes() for way in range(8)}) == 8


def test_files_that_do_not_fit_are_refused(tmp_path):
    save(some(3, TEST_SEED), tmp_path / "test.safetensors")
    with pytest.raises(ValueError, match="must hold other images than a test set's"):
        Source.of_file(tmp_path / "test.safetensors")
    with pytest.raises(ValueError, match="must not exceed the file's 3 images; got 4"):
        next(repeated(some(3), 0, 4, CPU))


def squares():
    rng = torch.Generator().manual_seed(0)
    while True:
        labels = torch.randint(2, (16,), generator=rng)
        images = torch.randint(100, (16, 16, 16), generator=rng, dtype=torch.uint8)
        corners = torch.randint(12, (16, 2), generator=rng).tolist()
        for image, label, (y, x) in zip(images, labels, corners):
            image[y : y + 4, x : x + 4] += 155 * label.to(torch.uint8)
        yield Batch(images, labels)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_learns_what_is_easy(precision):
    training = Training(
        Config(width=4, batch=16, lr=1e-2, warmup=1, steps=40, minutes=None, precision=precision), 16, CPU
    )
    records = []
    training.train(squares(), records.append)
    assert [record["step"] for record in records] == [20, 40]
    assert records[-1]["accuracy"] > 0.95 and records[-1]["loss"] < records[0]["loss"]
    assert records[-1] == training.last and records[-1]["images_per_s"] > 0


def weights_after(config):
    training = Training(config, 32, CPU)
    train(training, Source(EASY), 0)
    return training.model.state_dict()


def test_the_same_seed_gives_the_same_weights():
    first, again, other = (weights_after(replace(TINY, seed=seed)) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_minutes_end_a_training():
    training = Training(replace(TINY, steps=1000, minutes=1e-6), 16, CPU)
    training.train(squares())
    assert 1 <= training.step < 10 and training.last["step"] == training.step


def test_a_loss_that_is_no_number_ends_a_training():
    training = Training(TINY, 16, CPU)
    torch.nn.init.constant_(training.model.head.weight, torch.nan)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 3; lower --lr"):
        training.train(squares())


def test_answers_are_of_all_images_in_their_order():
    vectors = some(300)
    model = SmallCNN(32, 2)
    model(torch.from_numpy(render(vectors, 0, 50)))  # the running means are not those that it begins with
    right, loss = answers(model, vectors, TINY, CPU)
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(render(vectors)))
    labels = torch.from_numpy(vectors.labels).long()
    assert right.tolist() == (logits.argmax(1) == labels).tolist()
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, "width must be positive; got 0"),
        ({"lr": float("nan")}, "lr must be positive; got nan"),
        ({"batch": 0}, "batch must be from 1 to 65536; got 0"),
        ({"steps": None}, "steps or minutes to end by"),
        ({"steps": 0}, "steps must be positive; got 0"),
        ({"precision": "fp16"}, "precision must be one of fp32, bf16; got 'fp16'"),
    ],
)
def test_settings_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_figures_survive_their_files(folder):
    assert results.stored("pathfinder32-cl14") is None
    for each in (figure(128, 6), figure(32, 14)):
        results.write(each, folder)
    assert results.stored("pathfinder32-cl14") == figure(32, 14)
    assert results.all_in(folder) == [figure(32, 14), figure(128, 6)]
    assert results.as_rule(figure())["by_distance"] == [0.8, 0.7, None, 0.6]


def test_the_report_has_the_network_below_the_rules():
    text = report([figure()])
    rule = text.index("| pathfinder32-cl14 | 10,000 | marker distance | 55.0 ± 0.4 | 50.0 |")
    assert rule < text.index(
        "| pathfinder32-cl14 | 20,000 | small 2-D CNN | 75.0 ± 0.3 | 80.0 | 70.0 | - | 60.0 | 1 2 3 |"
    )
    assert "| 123,456 | fresh images | 576, 64 different | 1.5 | 6 | 70.0 | X |" in text


def test_path_x_results_are_told_beside_the_stored_figures(folder):
    stage = Stage(size=128, contour=14, tokens=1024, lr=1e-3, steps=1)
    assert evaluate.baselines(stage) == "" and table.cnn_rows() == []
    results.write(figure(128, 14, 0.812), folder)
    assert evaluate.baselines(stage) == "marker distance 55.0 %, small 2-D CNN 81.2 %"
    helps = ["class", "kept", "2-D convolution", "-", "convolutions", "fresh"]
    assert table.rows([])[1] == ["small 2-D CNN (ours)", "81.2 ± 0.3 %", "-", "-", *helps, "0.12M", "0.00M", "2 min, X"]


def call(*words):
    return CliRunner().invoke(cli.app, list(map(str, words)))


def test_the_command_trains_tests_and_writes(tmp_path):
    words = ("--steps", 2, "--batch", 8, "--width", 2, "--device", "cpu", "--test-images", 30, "--data", tmp_path)
    result = call("cnn", "--contour", 6, *words, "--workers", 0, "--out", tmp_path / "new")
    assert result.exit_code == 0, result.output
    [found] = results.all_in(tmp_path / "new")
    assert found["config"] == asdict(Config(width=2, batch=8, steps=2, minutes=None))
    assert found["cost"]["images"] == found["cost"]["different_images"] == 16 and found["images"] == 30
    assert str(TEST_SEED) in found["test_set"] and sum(found["by_distance"]["images"]) == 30
    assert [rule["rule"] for rule in found["by_distance"]["rules"]] == ["marker distance", "distance and end dashes"]
    for text in (result.output, (tmp_path / "new" / "cnn.md").read_text()):
        assert text.count("| pathfinder32-cl6 | 30 |") == 3
    json.dumps(found, allow_nan=False)

    result = call("cnn", "--contour", 6, *words, "--images", 20, "--out", tmp_path / "new")
    assert result.exit_code == 0, result.output
    [found] = results.all_in(tmp_path / "new")
    assert found["cost"]["different_images"] == 20
    assert found["trained_on"] == f"pathfinder32-cl6-generated-20-seed{training_seed(0)}.safetensors"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--contour", "6;9"), "Error: --contour must be numbers with commas between them, as 6,9,14; got '6;9'"),
        (("--size", 48), "Error: images have sizes 32, 64, 128, 256, 512 and paths of 2 to 14 dashes; got 48"),
        (("--file", "nowhere"), "Error: there is no file nowhere"),
        (("--file", "a", "--images", 5), "Error: --images draws a file of its own; leave it out with --file"),
        (("--minutes", 0), "Error: minutes must be positive; got 0"),
        (("--device", "abacus"), "Error: the device must be auto, cpu, cuda"),
    ],
)
def test_mistakes_are_answered_in_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call("cnn", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []
