import numpy as np

from experiments.pathfinder.draw import draw
from experiments.pathfinder.owners import marker_counts
from experiments.pathfinder.parameters import Parameters, lra
from experiments.pathfinder.render import render
from experiments.pathfinder.vectors import Vectors, collect


def vectors_of(parameters: Parameters):
    return collect(parameters, 4, [draw(parameters, 4, index) for index in range(12)])


def test_a_range_is_rendered_alone():
    vectors = vectors_of(lra(64, 6))
    assert np.array_equal(render(vectors, 3, 5), render(vectors)[3:5])
    assert np.array_equal(render(vectors, 10), render(vectors)[10:])


def test_rendering_some_at_a_time_does_not_look_at_all_images_every_time(monkeypatch):
    """Of a million images, that took a quarter of an hour."""
    vectors = vectors_of(lra(32, 6))
    seen, whole = [], Vectors.tips.fget
    monkeypatch.setattr(Vectors, "tips", property(lambda self: seen.append(len(self)) or whole(self)))
    for first in range(0, 12, 3):
        render(vectors, first, first + 3)
        marker_counts(vectors, first, first + 3)
    assert seen in ([12], [3] * 8)
