import numpy as np
import pytest
import torch

from experiments.lra import train
from experiments.lra.config import Config, configure
from experiments.lra.data.augment import WAYS, Turning, turned
from experiments.lra.data.batches import Shape, collate, evaluation_batches, training_batches
from experiments.lra.data.examples import Examples
from experiments.lra.data.order import Order
from experiments.lra.tasks import TASKS, Data

SIDE = 4
PIXELS = np.arange(16, dtype=np.uint8)


def examples(count: int = 12) -> Examples:
    pixels = np.random.default_rng(0).integers(0, 3, count * SIDE**2, dtype=np.uint8)
    begins = (np.arange(count) * SIDE**2)[:, None]
    return Examples(pixels, begins, begins + SIDE**2, np.zeros(count, np.uint8), shift=1)


def test_the_eight_ways_are_those_of_a_square():
    found = {tuple(turned(PIXELS, SIDE, way)) for way in range(8)}
    assert len(found) == 8
    assert tuple(PIXELS) in found
    for way in range(8):
        assert {tuple(turned(turned(PIXELS, SIDE, way), SIDE, each)) for each in range(8)} == found
    mirrored = turned(PIXELS, SIDE, WAYS["mirror"][1]).reshape(SIDE, SIDE)
    assert (mirrored == PIXELS.reshape(SIDE, SIDE)[:, ::-1]).all()


@pytest.mark.parametrize("setting", ["mirror", "square"])
def test_every_way_comes_about_as_often(setting):
    found = [tuple(image) for image in Turning(setting, SIDE, 0, 800)(0, [PIXELS] * 800)]
    ways = [tuple(turned(PIXELS, SIDE, way)) for way in WAYS[setting]]
    assert set(found) == set(ways)
    assert min(found.count(each) for each in ways) > 0.6 * 800 / len(ways)


def test_crops_move_an_image_and_its_mirror_image_by_up_to_four_pixels():
    pixels = np.random.default_rng(1).integers(1, 256, 12 * 12, dtype=np.uint8)
    found = {turned(pixels, 12, way).tobytes() for way in WAYS["crops"]}
    expected = set()
    for image in (pixels.reshape(12, 12), pixels.reshape(12, 12)[:, ::-1]):
        wide = np.pad(image, 4)
        expected |= {wide[y : y + 12, x : x + 12].tobytes() for y in range(9) for x in range(9)}
    assert found == expected and len(found) == len(WAYS["crops"]) == 2 * 81


def test_processes_that_share_a_batch_turn_its_images_as_one_would():
    whole = Turning("square", SIDE, 3, 8).ways(5)
    shares = [Turning("square", SIDE, 3, 8, slice(first, first + 4)).ways(5) for first in (0, 4)]
    assert np.array_equal(np.concatenate(shares), whole)
    assert not np.array_equal(whole, Turning("square", SIDE, 3, 8).ways(6))
    assert not np.array_equal(whole, Turning("square", SIDE, 4, 8).ways(5))


@pytest.mark.parametrize("setting", ["none", "square"])
def test_a_run_turns_its_training_images(setting, tmp_path, monkeypatch):
    seen = []
    ways = Turning.ways
    monkeypatch.setattr(Turning, "ways", lambda self, step: seen.append((self, step)) or ways(self, step))
    pixels = np.random.default_rng(0).integers(0, 256, 8 * 1024, dtype=np.uint8)
    begins = (np.arange(8) * 1024)[:, None]
    images = Examples(pixels, begins, begins + 1024, np.arange(8, dtype=np.uint8) % 2, shift=1)
    config = Config(
        task="pathfinder32", augment=setting, block=64, depth=1, width=16, heads=1, mlp=16, steps=2, batch=4, warmup=1,
        positions="rotary2d", pool="mean", device="cpu", seed=7,
    )  # fmt: skip
    data = Data(TASKS["pathfinder32"], tmp_path, "noise", True, images, images, images)
    train.Run(config, data, tmp_path / "run").train()
    expected = [] if setting == "none" else [("square", 32, 7, 4, step) for step in (0, 1)]
    assert [(each.setting, each.side, each.seed, each.batch, step) for each, step in seen] == expected


@pytest.mark.parametrize("drops", [False, True])
def test_batches_are_the_same_from_any_step_on_and_tests_are_left_alone(drops):
    data, shape = examples(), Shape(16, 16, cls=None, drop_background=drops)

    turning = Turning("square", SIDE, 5, 4)
    whole = training_batches(data, shape, Order(12, 4, 1), 0, turning)
    first = [next(whole) for _ in range(5)]
    resumed = training_batches(data, shape, Order(12, 4, 1), 3, turning)
    for batch in first[3:]:
        assert torch.equal(next(resumed).ids, batch.ids)
    plain = collate(data, Order(12, 4, 1).rows(0), shape)
    assert not torch.equal(first[0].ids, plain.ids)
    assert torch.equal(first[0].lengths, plain.lengths)
    (tested,) = evaluation_batches(data, shape, 12, 12)
    assert torch.equal(tested.ids, collate(data, np.arange(12), shape).ids)


def test_a_turned_image_without_its_background_has_its_pixels_where_they_turned_to():
    data, shape = examples(1), Shape(16, 16, cls=None, drop_background=True)
    batch = collate(data, np.array([0]), shape, lambda images: [turned(each, SIDE, 3) for each in images])
    image = np.zeros(16, np.int64)
    count = int(batch.lengths[0])
    image[batch.places[0, :count].numpy()] = batch.ids[0, :count].numpy() - 1
    assert (image == turned(data.sequence(0), SIDE, 3)).all()


def test_only_images_can_be_turned():
    with pytest.raises(ValueError, match="augment=square is for images; the task is text"):
        Config(task="text", augment="square")
    assert configure("modern", {"task": "image"}).augment == "mirror"
    assert configure("lra", {"task": "pathfinder32"}).augment == "none"
