import numpy as np
import pytest

from experiments.pathfinder.draw import draw
from experiments.pathfinder.owners import DISTRACTOR, NOBODY, marker_counts, owners
from experiments.pathfinder.parameters import lra
from experiments.pathfinder.render import render
from experiments.pathfinder.vectors import collect


def some(size, contour, count):
    parameters = lra(size, contour)
    return collect(parameters, 4, [draw(parameters, 4, index) for index in range(count)])


@pytest.mark.parametrize(("size", "contour"), [(32, 6), (32, 14), (64, 9), (128, 6)])
def test_every_drawn_pixel_has_an_owner(size, contour):
    vectors = some(size, contour, 12)
    assert not bool((owners(vectors)[render(vectors) > 0] == NOBODY).any())


def test_owners_are_the_snakes_that_light_the_pixels():
    vectors = some(64, 9, 6)
    found = owners(vectors)
    for index in range(len(vectors)):
        own = found[index]
        tips = vectors.tips[index]
        for snake in (0, 1):
            dashes = vectors.targets[index, snake]
            middle = vectors.places[dashes[len(dashes) // 2]]
            assert own[tuple(middle)] in (snake + 1, 2 - snake)
            assert own[tuple(tips[snake, 0])] == snake + 1
        begin, end = vectors.starts[index] + 2 * 9, vectors.starts[index + 1]
        others = [own[tuple(place)] for place in vectors.places[begin:end]]
        assert others.count(DISTRACTOR) >= 0.9 * len(others)
        assert {NOBODY, 1, 2, DISTRACTOR} == set(np.unique(own).tolist())


def test_marker_counts_answer_the_question():
    vectors = some(32, 9, 60)
    counts = marker_counts(vectors)
    assert (counts == 2).any((1, 2)).tolist() == (vectors.labels == 1).tolist()
    for number, (label, centres) in enumerate(zip(vectors.labels, vectors.markers)):
        assert [counts[number][tuple(centre)] for centre in centres] == [1 + label] * 2
    assert set(np.unique(counts[vectors.labels == 1])) == {0, 2}
    assert set(np.unique(counts[vectors.labels == 0])) == {0, 1}
