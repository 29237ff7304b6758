from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from experiments.pathfinder.draw import draw
from experiments.pathfinder.parameters import lra
from experiments.pathfinder.plain_render import lanczos, plain_render
from experiments.pathfinder.render import render
from experiments.pathfinder.rendering import (
    LEVELS,
    NOISE,
    ORIGINAL,
    OVERSHOOT,
    PROJECT,
    RENDERINGS,
    Rendering,
    drawn_rendering,
    layers,
    rendered,
)
from experiments.pathfinder.vectors import collect
from tests.experiments.pathfinder.parameters import OTHER

CASES = {"32": lra(32, 6), "64": lra(64, 6), "128": lra(128, 9), "256": lra(256, 6), "other": OTHER}
CASES["large"] = replace(OTHER, size=300)  # its places take 16 bits
QUIET = {name: each for name, each in RENDERINGS.items() if not each.noise}
IMAGES = 3


@pytest.fixture(scope="module", params=CASES)
def vectors(request):
    parameters = CASES[request.param]
    return collect(parameters, 4, [draw(parameters, 4, index) for index in range(IMAGES)])


@pytest.mark.parametrize("name", QUIET)
def test_both_renderers_agree_in_every_rendering(vectors, name):
    """The fast one counts in units of 1 / 8192, so a value may round to the next whole number."""
    for index in range(IMAGES):
        plain = plain_render(vectors, index, RENDERINGS[name]).astype(int)
        difference = np.abs(rendered(vectors, index, RENDERINGS[name]) - plain)
        assert difference.max() <= 1 and (difference > 0).mean() < 0.02


def test_the_rule_of_this_project_gives_the_bits_of_the_fast_renderer(vectors):
    images = [rendered(vectors, index, RENDERINGS[PROJECT]) for index in range(IMAGES)]
    assert np.array_equal(np.stack(images), render(vectors))


def test_lanczos_is_the_filter_of_pillow_and_overshoots():
    drawing = (np.random.default_rng(0).random((41, 41)) < 0.5).astype(np.float32)
    along = lanczos(41, 21)
    assert np.allclose(along.sum(axis=1), 1)
    ours = along @ drawing @ along.T
    theirs = np.asarray(Image.fromarray(drawing).resize((21, 21), Image.Resampling.LANCZOS))
    assert np.abs(ours - theirs).max() < 1e-5
    assert ours.max() > 1.01 and ours.min() < -0.01


def test_clipping_leaves_no_overshoot(vectors):
    p = vectors.parameters
    highest = max(p.target_contrast, p.distractor_contrast)
    assert layers(vectors, 0).marks.max() > 1.05
    clipped = layers(vectors, 0, "clipped")
    assert clipped.marks.max() == 1 and clipped.lines.max() <= highest * 1.001


def test_lines_keep_their_contrast_under_the_originals_scaling(vectors):
    lines, marks = layers(vectors, 0)
    expected = np.maximum(lines, marks) / max(lines.max(), marks.max()) * 255
    assert np.abs(rendered(vectors, 0, RENDERINGS[ORIGINAL]) - expected).max() <= 0.51


def test_brightness_floor_and_rounding():
    lines, marks = np.array([[0.0, 0.02, 0.5]]), np.array([[1.0, 0.0, 0.0]])
    plain = Rendering(lines=None)
    assert plain.finish(lines, marks).tolist() == [[255, 5, 127]]
    assert replace(plain, levels="rounded").finish(lines, marks).tolist() == [[255, 5, 128]]
    assert replace(plain, brightness=0.5).finish(lines, marks).tolist() == [[127, 2, 63]]
    assert replace(plain, brightness=1.1).finish(lines, marks).tolist() == [[255, 5, 140]]
    assert replace(plain, floor=8).finish(lines, marks).tolist() == [[255, 0, 127]]
    assert replace(plain, lines=1.0).finish(lines, marks).tolist() == [[255, 10, 255]]


@pytest.mark.parametrize("noisy", NOISE)
def test_noise_has_its_deviation_and_its_place(noisy):
    lines = np.zeros((200, 200))
    lines[:, :100], marks = 0.5, np.zeros((200, 200))
    marks[0, 0] = 1.0
    image = Rendering(lines=0.5, noise=10.0, noisy=noisy).finish(lines, marks, np.random.default_rng(0)).astype(float)
    assert abs(image[1:, :100].std() - 10) < 0.3 and abs(image[1:, :100].mean() - 127.5) < 1
    assert (image[:, 100:] > 0).mean() == pytest.approx(0.46 if noisy == "everywhere" else 0.0, abs=0.02)


def test_both_renderers_agree_in_the_amount_of_noise():
    parameters = lra(64, 6)
    vectors = collect(parameters, 4, [draw(parameters, 4, 0)])
    rendering = RENDERINGS["noise of 10 levels"]
    ours, plain = (
        function(vectors, 0, rendering, np.random.default_rng(1)).astype(float) for function in (rendered, plain_render)
    )
    assert ours.mean() == pytest.approx(plain.mean(), rel=0.05) and ours.std() == pytest.approx(plain.std(), rel=0.05)


def test_drawn_renderings_have_every_kind_and_come_from_the_random_numbers_alone():
    found = [drawn_rendering(np.random.default_rng(seed)) for seed in range(400)]
    assert found[:20] == [drawn_rendering(np.random.default_rng(seed)) for seed in range(20)]
    for name, values in (("overshoot", OVERSHOOT), ("levels", LEVELS), ("noisy", NOISE)):
        assert {getattr(each, name) for each in found} == set(values)
    assert Rendering() in found
    assert any(each.lines is None for each in found) and any(each.lines == 1 for each in found)
    brightness = [each.brightness for each in found]
    assert min(brightness) < 0.85 and max(brightness) > 1.1
    assert max(each.noise for each in found) > 10 and min(each.noise for each in found) == 0
    assert max(each.floor for each in found) > 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"overshoot": "cut"}, "overshoot must be one of kept, clipped; got 'cut'"),
        ({"brightness": 0.0}, "lines and brightness must be more than 0; got 1.0 and 0.0"),
        ({"noise": -1.0}, "noise must be at least 0, the floor from 0 to 255; got -1.0 and 1"),
    ],
)
def test_impossible_renderings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Rendering(**values)


@pytest.mark.parametrize("function", [rendered, plain_render])
def test_noise_needs_random_numbers(function):
    vectors = collect(lra(32, 6), 4, [draw(lra(32, 6), 4, 0)])
    with pytest.raises(ValueError, match="must have random numbers"):
        function(vectors, 0, Rendering(noise=1.0))
