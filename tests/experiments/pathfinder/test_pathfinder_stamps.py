import numpy as np
import pytest
from PIL import Image

from experiments.pathfinder.geometry import circle, disc, move, reverse, turning_weight
from experiments.pathfinder.parameters import lra
from experiments.pathfinder.stamps import UNIT, dash, marker_window, markers, quantise
from experiments.pathfinder.tables import SEEDS, digest, lines, tables

ALL = [(size, margin) for size in (32, 64, 128, 256) for margin in lra(size, 14).margins]


# With Pillow 12.3.0 and 13.0.0. Where they change, all images do.
@pytest.mark.parametrize(
    ("size", "known"),
    [(32, "6201fdfcb63749ee"), (64, "3cd7f9dd08c14350"), (128, "230771b70ce2d74c"), (256, "f8d89fb35c48a6a2")],
)
def test_stamps_are_known(size, known):
    assert digest(lra(size, 14)) == digest(lra(size, 6)) == known


def test_directions_of_a_snake_that_has_begun():
    assert [len(circle(radius)) for radius in (3, 6, 7, 8)] == [18, 38, 41, 49]
    assert circle(3).min() == -3 and circle(3).max() == 3


def test_turning_weight_falls_from_straight_on_to_none():
    turns = np.deg2rad([0, 20, 49, 51, 180])
    weights = turning_weight(np.float64(0), turns, 1.8)
    assert weights[0] == 1 and weights[1] == pytest.approx(np.cos(np.deg2rad(36)) ** 2)
    assert 0.0009 < weights[2] < 0.001 and weights[3:].max() < 1e-30
    assert turning_weight(np.deg2rad(175), np.deg2rad(-175), 1.0) == pytest.approx(np.cos(np.deg2rad(10)) ** 2)


def test_reversed_directions_are_opposite():
    angles = np.deg2rad(np.arange(-180, 181))
    assert np.allclose(move(reverse(angles), 5), -move(angles, 5))


@pytest.mark.parametrize(("size", "margin"), ALL)
def test_a_dash_begins_in_the_middle_and_its_surroundings_hold_it(size, margin):
    p = lra(size, 14)
    for angle in np.deg2rad([0, 37, 90, -120]).tolist():
        line, area = dash(angle, p.dash_length, p.thickness, margin)
        middle = len(line) // 2
        assert line[middle, middle] > 0.2
        y, x = np.indices(line.shape)
        along = (y - middle) * np.sin(angle) + (x - middle) * np.cos(angle)
        assert (along * line).sum() / line.sum() == pytest.approx(p.dash_length / 2, abs=0.75)
        assert area[line > line.max() / 2].min() > 0.9
        assert not line[area < -0.2].any()
        reach = p.dash_length + margin + p.thickness
        assert abs(area[np.hypot(y - middle, x - middle) > reach + 3]).max(initial=0) < 0.05


@pytest.mark.parametrize(("size", "unusable"), [(32, 0.83), (64, 0.717), (128, 0), (256, 0)])
def test_directions_in_which_the_original_never_begins(size, unusable):
    p = lra(size, 14)
    for margin in p.margins:
        assert 1 - tables(p, margin).usable.mean() == pytest.approx(unusable, abs=0.001)


@pytest.mark.parametrize(("size", "margin"), ALL)
def test_tables_have_one_row_for_each_direction(size, margin):
    p = lra(size, 14)
    t = tables(p, margin)
    headings = SEEDS + len(t.turns)
    assert len(t.step) == len(t.weights) == len(t.masks) == lines(p, margin).shape[1] == headings
    assert UNIT < t.masks.max() < 1.3 * UNIT
    assert np.array_equal(np.unique(t.disc, axis=0), np.argwhere(disc(margin)) - margin)


def test_distractors_are_brighter_than_targets_at_32_pixels_only():
    for size in (32, 64, 128, 256):
        targets, distractors = lines(lra(size, 6), lra(size, 6).margins[0])
        assert (distractors.max() > targets.max()) == (size == 32)


@pytest.mark.parametrize("place", [(0, 0), (1, 40), (63, 2), (30, 30), (62, 63), (8, 55)])
def test_markers_are_those_drawn_on_the_whole_image(place):
    p = lra(64, 14)
    y, x = np.mgrid[: 2 * p.size, : 2 * p.size]
    inside = (y - 2 * place[0]) ** 2 + (x - 2 * place[1]) ** 2 <= (2 * p.marker_radius) ** 2
    drawn = Image.fromarray(inside.astype(np.float32)).resize((p.size, p.size), Image.Resampling.LANCZOS)
    width = marker_window(p.size, p.marker_radius)
    top, left = (min(max(along - width // 2, 0), p.size - width) for along in place)
    ours = np.zeros((p.size, p.size))
    window = markers(p.size, p.marker_radius)[place[0] - top, place[1] - left]
    ours[top : top + width, left : left + width] = window / UNIT
    assert np.abs(ours - np.asarray(drawn)).max() < 1 / UNIT


def test_too_bright_a_picture_is_refused():
    with pytest.raises(ValueError, match=r"a contrast must be at most 3; got a picture of brightness 4\.0"):
        quantise(np.array([[4.0]]))
