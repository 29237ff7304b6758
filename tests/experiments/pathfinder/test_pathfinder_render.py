from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.pathfinder.draw import draw
from experiments.pathfinder.owners import marker_counts
from experiments.pathfinder.parameters import lra
from experiments.pathfinder.render import render
from experiments.pathfinder.render_device import DeviceRenderer
from experiments.pathfinder.vectors import Vectors, collect
from tests.drawn.counts import examples_times
from tests.experiments.pathfinder.parameters import OTHER

CASES = {"32-6": lra(32, 6), "64-6": lra(64, 6), "128-9": lra(128, 9), "256-6": lra(256, 6), "other": OTHER}
CASES["large"] = replace(OTHER, size=300)
VECTORS = {}


def vectors_of(name):
    if name not in VECTORS:
        VECTORS[name] = collect(CASES[name], 4, [draw(CASES[name], 4, index) for index in range(12)])
    return VECTORS[name]


@pytest.mark.parametrize("name", CASES)
def test_numpy_and_pytorch_give_the_same_bits(name):
    vectors = vectors_of(name)
    images = DeviceRenderer(vectors, "cpu")(torch.arange(len(vectors)))
    assert images.dtype == torch.uint8
    assert np.array_equal(images.numpy(), render(vectors))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_gpu_gives_the_same_bits(name):
    vectors = vectors_of(name)
    images = DeviceRenderer(vectors, "cuda")(torch.arange(len(vectors)))
    assert images.device.type == "cuda"
    assert np.array_equal(images.cpu().numpy(), render(vectors))


@given(st.lists(st.integers(0, 11), min_size=1, max_size=8))
@examples_times(1 / 2)
def test_batches_may_have_any_order_and_repeat(indices):
    vectors = vectors_of("32-6")
    assert np.array_equal(DeviceRenderer(vectors, "cpu")(torch.tensor(indices)).numpy(), render(vectors)[indices])


def test_a_range_is_rendered_alone():
    vectors = vectors_of("64-6")
    assert np.array_equal(render(vectors, 3, 5), render(vectors)[3:5])
    assert np.array_equal(render(vectors, 10), render(vectors)[10:])


def test_rendering_some_at_a_time_does_not_look_at_all_images_every_time(monkeypatch):
    """Of a million images, that took a quarter of an hour."""
    vectors = collect(CASES["32-6"], 4, [draw(CASES["32-6"], 4, index) for index in range(12)])
    seen, whole = [], Vectors.tips.fget
    monkeypatch.setattr(Vectors, "tips", property(lambda self: seen.append(len(self)) or whole(self)))
    for first in range(0, 12, 3):
        render(vectors, first, first + 3)
        marker_counts(vectors, first, first + 3)
    assert seen in ([12], [3] * 8)
