from itertools import pairwise

import numpy as np
import pytest
from PIL import Image, ImageDraw

from experiments.pathfinder.parameters import parameters_of
from experiments.pathfinder.strokes import SAMPLES, STYLES, TRAINING, Stroked, sampled, stroked

SIZE, CONTOUR, COUNT = 64, 6, 60
FINER = 16  # resolution of the slow drawing


@pytest.fixture(scope="module", params=STYLES)
def drawn(request):
    return request.param, [stroked(request.param, SIZE, CONTOUR, 3, index) for index in range(COUNT)]


def points_of(dash):
    points = np.empty((SAMPLES, 2))
    sampled(dash, points)
    return points


def curves_of(image: Stroked):
    return {int(curve): image.dashes[image.dashes[:, 5] == curve] for curve in np.unique(image.dashes[:, 5])}


def test_an_image_depends_on_style_size_length_seed_and_index_alone():
    def made(*of):
        return stroked(*of).image.tobytes()

    first = ("second", 64, 6, 3, 0)
    others = [("third", 64, 6, 3, 0), ("second", 64, 6, 4, 0), ("second", 64, 6, 3, 1), ("second", 64, 9, 3, 0)]
    assert made(*first) == made(*first)
    assert len({made(*each) for each in (first, *others)}) == 5


def test_two_targets_of_equal_length_and_short_distractors(drawn):
    _, images = drawn
    p = parameters_of(SIZE, CONTOUR)
    distractors = []
    for image in images:
        lengths = {curve: len(dashes) for curve, dashes in curves_of(image).items()}
        assert lengths[0] == lengths[1] == CONTOUR
        others = [length for curve, length in lengths.items() if curve > 1]
        assert set(others) <= {p.distractor_length}
        distractors.append(len(others))
    assert 3 < np.mean(distractors) <= p.distractors


def test_dashes_gaps_and_turns_are_in_the_ranges_of_the_style(drawn):
    name, images = drawn
    style, p = STYLES[name], parameters_of(SIZE, CONTOUR)
    least, most = 1 - style.jitter, 1 + style.jitter
    for image in images:
        assert style.widths[0] * p.thickness <= image.width <= style.widths[1] * p.thickness
        assert style.gaps[0] * 2 * p.margins[0] <= image.gap <= style.gaps[1] * 2 * p.margins[0]
        for dashes in curves_of(image).values():
            assert (dashes[:, 3] >= style.dashes[0] * least).all() and (dashes[:, 3] <= style.dashes[1] * most).all()
            assert (dashes[:, 6] >= style.faintest).all() and (dashes[:, 6] <= 1).all()
            for before, after in pairwise(dashes):
                between = np.linalg.norm(points_of(before)[-1] - points_of(after)[0])
                assert 0.9 * image.gap * least <= between <= image.gap * most + 1e-9
                last = before[2] + before[4] * before[3]
                turn = (after[2] + after[4] * after[3] / 2 - last + np.pi) % (2 * np.pi) - np.pi
                assert abs(turn) <= style.turn * most / least + 1e-9
    bends = np.concatenate([image.dashes[:, 4] for image in images])
    assert bends.any() == style.curved
    lengths = [np.ptp(image.dashes[:, 3]) for image in images]
    assert (max(lengths) > 0.5) == (style.jitter > 0)


def test_curves_keep_apart_and_inside(drawn):
    _, images = drawn
    for image in images:
        points = np.stack([points_of(dash) for dash in image.dashes])
        assert points.min() >= image.width / 2 + 1 and points.max() <= SIZE - 1 - image.width / 2 - 1
        apart = np.linalg.norm(points[:, None, :, None] - points[None, :, None], axis=-1).min((2, 3))
        curve = image.dashes[:, 5]
        other = curve[:, None] != curve[None]
        assert apart[other].min() >= image.width + 3 - 1e-9


def test_the_label_says_whether_both_markers_are_on_one_curve(drawn):
    _, images = drawn
    labels = np.array([image.label for image in images])
    assert 0.3 < labels.mean() < 0.7
    marked = []
    for image in images:
        curves = curves_of(image)
        ends = {(curve, end): points_of(curves[curve][end])[end] for curve in (0, 1) for end in (0, -1)}
        found = [min(ends, key=lambda each: np.linalg.norm(ends[each] - marker)) for marker in image.markers]
        for each, marker in zip(found, image.markers, strict=True):
            assert np.allclose(ends[each], marker)
        assert [end for _, end in found] == [0, -1]
        assert (found[0][0] == found[1][0]) == bool(image.label)
        marked.append(found[0][0])
        assert image.counts.max() == 1 + image.label
        for curve in (0, 1):
            own = sum(each == curve for each, _ in found)
            middle = points_of(curves[curve][CONTOUR // 2])[SAMPLES // 2].round().astype(int)
            assert image.counts[tuple(middle)] == own
        assert (image.counts[image.image == 0] == 0).mean() > 0.99
    assert 0.2 < np.mean(marked) < 0.8


def test_pixels_are_those_of_a_slow_drawing(drawn):
    """Coverage of each pixel by shapes drawn 16 times larger; the fast one takes the distance to the border for it."""
    name, images = drawn
    for image in images[:5]:
        canvas = np.zeros((SIZE, SIZE))
        for dash in image.dashes:
            large = Image.new("L", (SIZE * FINER, SIZE * FINER))
            pen = ImageDraw.Draw(large)
            points = (points_of(dash)[:, ::-1] + 0.5) * FINER
            width = image.width * FINER
            if STYLES[name].curved:
                for x, y in (points[0], points[-1], *points):
                    pen.ellipse([x - width / 2, y - width / 2, x + width / 2, y + width / 2], fill=255)
                pen.line([tuple(point) for point in points], fill=255, width=round(width))
            else:
                across = np.array([np.sin(dash[2]), -np.cos(dash[2])]) * width / 2
                corners = [points[0] + across, points[-1] + across, points[-1] - across, points[0] - across]
                pen.polygon([tuple(corner) for corner in corners], fill=255)
            shrunk = np.asarray(large, float).reshape(SIZE, FINER, SIZE, FINER).mean((1, 3)) / 255
            canvas = np.maximum(canvas, dash[6] * shrunk)
        y, x = np.mgrid[:SIZE, :SIZE]
        away = np.min([np.hypot(y - cy, x - cx) for cy, cx in image.markers], axis=0) > 5
        difference = np.abs(canvas - image.image / 255)[away]
        assert difference.max() < 0.35
        assert difference[canvas[away] > 0].mean() < 0.06


def test_the_distance_of_the_markers_does_not_tell_the_answer(drawn):
    """The best threshold on the very images it is tested on."""
    name, _ = drawn
    images = [stroked(name, SIZE, CONTOUR, 7, index) for index in range(400)]
    distances = np.array([np.linalg.norm(image.markers[0] - image.markers[1]) for image in images])
    labels = np.array([image.label for image in images])
    right = [max(((distances > t) == labels).mean(), ((distances <= t) == labels).mean()) for t in distances]
    assert max(right) < 0.8
    brightness = np.array([image.image.mean() for image in images])
    right = [max(((brightness > t) == labels).mean(), ((brightness <= t) == labels).mean()) for t in brightness]
    assert max(right) < 0.6


def test_the_third_is_for_testing_alone():
    assert TRAINING == ("original", "second") and "third" in STYLES


def test_an_unknown_style_is_refused():
    with pytest.raises(ValueError, match="the strokes must be one of original, second, third; got 'fourth'"):
        stroked("fourth", 64, 6, 0, 0)
