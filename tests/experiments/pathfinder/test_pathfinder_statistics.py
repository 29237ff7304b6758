import re
from math import hypot

import numpy as np
import pytest

from experiments.pathfinder import original
from experiments.pathfinder.draw import draw
from experiments.pathfinder.parameters import lra
from experiments.pathfinder.report import deviation, markdown, shortcuts_report, statistics_report
from experiments.pathfinder.shortcuts import Pairs, describe, evaluate, pairs, shortcuts, tip_directions
from experiments.pathfinder.statistics import COLUMNS, Estimate, estimate, statistics
from experiments.pathfinder.vectors import collect

CELLS = {(32, 6): 1500, (256, 14): 200}
VECTORS = {}


def vectors_of(size, contour):
    if (size, contour) not in VECTORS:
        p = lra(size, contour)
        VECTORS[size, contour] = collect(p, 8, [draw(p, 8, index) for index in range(CELLS[size, contour])])
    return VECTORS[size, contour]


@pytest.mark.parametrize(("size", "contour"), CELLS)
def test_statistics_are_the_original_generators(size, contour):
    found = statistics(vectors_of(size, contour))
    *_, theirs = original.STATISTICS[size, contour]
    assert found.keys() == COLUMNS.keys()
    for name, value in theirs.items():
        error = hypot(found[name].error, value.error)
        assert abs(found[name].mean - value.mean) < 4 * error, name
    assert abs(found["label"].mean - 0.5) < 4 * found["label"].error


def test_estimates_are_means_and_their_errors():
    found = estimate(np.array([1, 2, 3, 6]))
    assert found.mean == 3 and found.error == pytest.approx(np.std([1, 2, 3, 6]) / 2)
    assert str(Estimate(1234.5, 56)) == "1,234 ± 56"
    assert str(Estimate(15, 0)) == "15.000 ± 0.000"


@pytest.mark.parametrize(("size", "contour"), [(32, 6), (256, 14)])
def test_dashes_at_a_snakes_ends_point_along_it(size, contour):
    vectors = vectors_of(size, contour)
    directions = tip_directions(vectors)
    step = np.stack([np.sin(directions), np.cos(directions)], axis=-1)
    places = vectors.places[vectors.targets].astype(int)
    from_first, from_last = places[:, :, 1] - places[:, :, 0], places[:, :, -2] - places[:, :, -1]
    assert (step[:, :, 0] * from_first).sum(-1).min() > 0
    assert (step[:, :, 1] * from_last).sum(-1).min() > 0


def test_pairs_hold_every_answer_twice_and_the_markers_that_are_there():
    vectors = vectors_of(32, 6)
    found = pairs(vectors)
    assert found.labels.mean() == 0.5 and found.features.shape == (1500, 4, 5)
    distance = np.hypot(*(vectors.markers[:, 1] - vectors.markers[:, 0]).T)
    second = np.where(vectors.labels == 1, vectors.marked, 1 - vectors.marked)
    shown = 2 * vectors.marked.astype(int) + second
    image = np.arange(1500)
    assert np.allclose(found.features[image, shown, 0], distance)
    assert np.array_equal(found.labels[image, shown], vectors.labels)
    assert (found.features[..., 2] >= -1e-12).all()


def test_mirrored_and_turned_images_have_the_same_features():
    ends, angles = np.array([[[3.0, 4.0], [20.0, 9.0]]]), np.array([[0.3, -2.0]])
    expected = describe(ends, angles)
    assert np.allclose(describe(ends[..., ::-1], np.pi / 2 - angles), expected)
    assert np.allclose(describe(np.stack([ends[..., 1], -ends[..., 0]], axis=-1), angles + np.pi / 2), expected)
    assert np.allclose(describe(ends + 7, angles), expected)


def test_shortcuts_are_the_original_generators():
    images, *theirs = original.SHORTCUTS[32, 6]
    found = shortcuts(pairs(vectors_of(32, 6)))
    for shortcut, accuracy in zip(found, theirs):
        # 0.01 is granted for fewer images, beside the two standard errors.
        error = hypot(shortcut.error, (accuracy * (1 - accuracy) / images) ** 0.5)
        assert abs(shortcut.accuracy - accuracy) < 2 * error + 0.01
        assert shortcut.images == 1500 and len(shortcut.by_distance) == 4
        assert min(shortcut.by_distance) <= shortcut.accuracy <= max(shortcut.by_distance)


def test_a_shortcut_learns_nothing_from_answers_at_random():
    examples = pairs(vectors_of(32, 6))[:1000]
    labels = np.random.default_rng(0).integers(0, 2, examples.labels.shape).astype(np.uint8)
    assert abs(evaluate("control", examples.features, labels, seed=0).accuracy - 0.5) < 0.03


def test_too_few_images_are_refused():
    with pytest.raises(ValueError, match="needs at least 10 images to be fitted and tested; got 3"):
        shortcuts(Pairs(np.zeros((3, 4, 5)), np.zeros((3, 4), np.uint8)))


def test_reports_set_ours_beside_the_original():
    p, vectors = lra(32, 6), vectors_of(32, 6)
    text = statistics_report([(p, len(vectors), statistics(vectors))])
    assert re.search(r"\| pathfinder32-cl6 \| 1,500 \| 1\d\.\d+ ± 0\.\d+ \|", text)
    assert "| original | 1,057 (1,000) | 11.04 ± 0.32 | 5.484 ± 0.047 |" in text
    assert deviation(Estimate(2, 3), Estimate(1, 4)) == "+0.2" and deviation(Estimate(2, 3), None) == ""
    assert deviation(Estimate(15, 0), Estimate(15, 0)) == "+0"
    text = shortcuts_report([(p, shortcuts(pairs(vectors)[:200]))], [(lra(32, 14), 4, shortcuts(pairs(vectors)[:100]))])
    assert re.search(r"\| pathfinder32-cl6 \| 200 \| marker distance \| \d+\.\d ± \d\.\d \|", text)
    assert "| pathfinder32-cl14 | 283 |" in text
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
