import json
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import pytest

from experiments.pathfinder import draw as draw_module
from experiments.pathfinder.draw import draw
from experiments.pathfinder.parameters import FOLDS, LRA, Parameters, lra
from experiments.pathfinder.render import render
from experiments.pathfinder.tables import tables
from experiments.pathfinder.vectors import collect
from tests.experiments.pathfinder.parameters import OTHER

CELLS = [(size, contour) for size in LRA for contour in FOLDS]


# Attempts, and a hash of the drawings and of the pictures, of the first three images. A plain second generator, which
# was here before, drew the same images.
KNOWN = {
    "pathfinder32-cl6": ([3, 7, 24], "c345beca"), "pathfinder32-cl9": ([11, 30, 24], "e6f90f0b"),
    "pathfinder32-cl14": ([278, 382, 121], "b46ebee5"), "pathfinder64-cl6": ([2, 6, 5], "6863b46f"),
    "pathfinder64-cl9": ([158, 20, 239], "27f00ce5"), "pathfinder64-cl14": ([1629, 5139, 524], "440120c2"),
    "pathfinder128-cl6": ([1, 3, 1], "20c6ffb3"), "pathfinder128-cl9": ([14, 1, 30], "4fdb99d3"),
    "pathfinder128-cl14": ([94, 17, 314], "bdb28fe3"), "pathfinder256-cl6": ([2, 1, 1], "e636265d"),
    "pathfinder256-cl9": ([5, 1, 1], "91bfbd32"), "pathfinder256-cl14": ([21, 2, 1], "57d3601d"),
    "pathfinder96-cl5-329c7cc7": ([6, 1, 1], "51d1b516"),
}  # fmt: skip


@pytest.mark.parametrize("parameters", [*(lra(*cell) for cell in CELLS), OTHER], ids=lambda parameters: parameters.name)
def test_first_images_of_seed_0_are_known(parameters):
    drawings = [draw(parameters, 0, index) for index in range(3)]
    found = [each for x in drawings for each in (*x.dashes.astype("<i8").ravel().tolist(), x.label, x.marked, x.margin)]
    images = render(collect(parameters, 0, drawings))
    digest = blake2b(json.dumps(list(map(int, found))).encode() + images.tobytes(), digest_size=4)
    assert ([x.attempts for x in drawings], digest.hexdigest()) == KNOWN[parameters.name]


@pytest.mark.parametrize(("size", "contour"), [(32, 9), (64, 6), (128, 9), (256, 6)])
def test_dashes_follow_one_another_along_every_snake(size, contour):
    p = lra(size, contour)
    for index in range(20):
        drawing = draw(p, 1, index)
        assert drawing.margin in p.margins
        t = tables(p, drawing.margin)
        others = len(drawing.dashes) - 2 * contour
        assert others % p.distractor_length == 0 and others <= p.distractors * p.distractor_length
        assert drawing.dashes[:, :2].min() >= 0 and drawing.dashes[:, :2].max() < size
        for snake in (drawing.dashes[:contour], drawing.dashes[contour : 2 * contour]):
            assert snake[0, 2] < 360 <= snake[1:, 2].min()
            for before, after in pairwise(snake[1:]):
                pivot = before[:2] - t.turns[before[2] - 360]
                pivot = np.ceil(pivot + t.step[before[2]])
                assert np.array_equal(after[:2] - pivot, t.turns[after[2] - 360])
                assert t.weights[before[2], after[2] - 360] > 0


def test_image_depends_on_parameters_seed_and_number():
    p = lra(32, 6)
    assert np.array_equal(draw(p, 3, 5).dashes, draw(p, 3, 5).dashes)
    for other in (draw(p, 4, 5), draw(p, 3, 6), draw(lra(32, 9), 3, 5)):
        assert not np.array_equal(draw(p, 3, 5).dashes[:4], other.dashes[:4])
    labels = [[draw(lra(size, 6), 0, index).label for index in range(40)] for size in (32, 64)]
    assert labels[0] != labels[1]


def test_impossible_images_are_given_up(monkeypatch):
    monkeypatch.setattr(draw_module, "MOST_ATTEMPTS", 100)
    with pytest.raises(ValueError, match="no pair of target snakes fits into image 7 in 100 attempts"):
        draw(replace(lra(32, 14), contour_length=60), 0, 7)
    with pytest.raises(ValueError, match="no target snake can begin within an image"):
        draw(replace(lra(64, 6), padding=40), 0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "size must be positive; got 0"),
        ({"thickness": -1.0}, r"thickness must be positive; got -1\.0"),
        ({"distractors": -1}, "distractors must not be negative; got -1"),
        ({"margins": ()}, r"margins must be one or more numbers from 1 to 255; got \(\)"),
        ({"margins": (0, 2)}, "margins must be one or more numbers from 1 to 255"),
        ({"thickness": 0.7}, r"thickness must be a multiple of half a pixel; got 0\.7"),
        ({"size": 70000}, "size must be at most 65536 pixels; got 70000"),
        ({"contour_length": 1}, "contour_length must be at least 2 dashes; got 1"),
        ({"seed_distance": 8}, "seed_distance must exceed dash_length plus margin, 8; got 8"),
        ({"seed_distance": 32}, "size must exceed four times the seed_distance, 128, .* got 128"),
    ],
)
def test_parameters_that_no_image_can_have_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(lra(128, 14), **change)


def test_parameters_are_named_and_read_back():
    assert lra(128, 14).name == "pathfinder128-cl14" and lra(128, 14).is_lra
    other = replace(lra(128, 14), distractors=8)
    assert other.name.startswith("pathfinder128-cl14-") and not other.is_lra and not OTHER.is_lra
    assert Parameters.from_json(OTHER.to_json()) == OTHER
    with pytest.raises(ValueError, match=r"parameters must be .*contour_length.*; got size"):
        Parameters.from_json('{"size": 32}')
    with pytest.raises(ValueError, match="has sizes 32, 64, 128, 256 with contour lengths 6, 9, 14; got 128 with 12"):
        lra(128, 12)
