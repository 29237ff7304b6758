from dataclasses import replace

import numpy as np
import pytest

from experiments.pathfinder.draw import draw
from experiments.pathfinder.parameters import lra
from experiments.pathfinder.render import render
from experiments.pathfinder.seeds import TEST_SEED, VALIDATION_SEED, image_index, training_seed
from experiments.pathfinder.vectors import collect
from experiments.pathx.config import Config, Stage
from experiments.pathx.data.batches import (
    Original,
    draw_and_pack,
    drawing_of,
    drawn,
    images_at_once,
    make,
    pack_strokes,
    pack_vectors,
    recipe_of,
    training_image,
)
from experiments.pathx.data.packing import LEVELS
from experiments.pathx.data.stream import Stream

STAGE = Stage(size=32, contour=6, tokens=2048, lr=1e-3, steps=5)
DRAWN = Config(curriculum=(STAGE, replace(STAGE, contour=9)), layers="near:6,rows:1", block=32)
CONFIG = replace(DRAWN, renderings=False, floor=1)


def some(size, contour, count):
    parameters = lra(size, contour)
    return collect(parameters, 4, [draw(parameters, 4, index) for index in range(count)])


def same(first, second):
    arrays = [(first.ids, second.ids), (first.labels, second.labels), (first.blocks, second.blocks)]
    for name, tiles in first.tiles.items():
        arrays += list(zip(tiles, second.tiles[name]))
    if first.pixel_labels is not None:
        arrays.append((first.pixel_labels, second.pixel_labels))
    return all(np.array_equal(a, b) for a, b in arrays)


@pytest.fixture(scope="module")
def there():
    with Stream(2) as stream:
        yield stream


def test_images_of_training_and_test_differ():
    seen = {
        drawn(32, 6, seed, index).places.tobytes()
        for seed in (TEST_SEED, VALIDATION_SEED, training_seed(0), training_seed(1))
        for index in range(50)
    }
    assert len(seen) == 200


def test_a_step_is_filled_up_to_the_first_image_without_room():
    recipe = recipe_of(CONFIG, 0)
    batch = make(recipe, 3)
    assert batch.ids.shape == (1, 2048)
    used = int((batch.blocks < 64).sum())
    following = drawn(32, 6, recipe.seed, image_index(0, 3, batch.images))
    assert used <= 64 < used + -(-np.count_nonzero(render(following)) // 32)


def test_drawn_renderings_depend_on_the_seed_and_the_index_alone():
    recipe = recipe_of(DRAWN, 0)
    batch = make(recipe, 3)
    assert same(batch, make(recipe, 3))
    for place in (0, batch.images - 1):
        index = image_index(0, 3, place)
        image = training_image(recipe, Original(drawn(32, 6, recipe.seed, index)), index)
        pixels = batch.ids[0].reshape(-1, 32)[batch.blocks[place][batch.blocks[place] < 64]]
        assert sorted(pixels[pixels >= 0].tolist()) == sorted(image[image > 0].tolist())
    plain = render(drawn(32, 6, recipe.seed, image_index(0, 3, 0)))[0]
    other = training_image(replace(recipe, seed=recipe.seed + 1), Original(drawn(32, 6, recipe.seed, 0)), 0)
    assert not np.array_equal(other, plain)


def test_some_training_images_keep_their_faint_pixels_and_no_noise_fills_a_batch():
    recipe = recipe_of(DRAWN, 0)
    images = [training_image(recipe, Original(drawn(32, 6, recipe.seed, index)), index) for index in range(200)]
    faint = [bool(((image > 0) & (image < recipe.floor)).any()) for image in images]
    assert 0.1 < sum(faint) / len(faint) < 0.3
    assert max(np.count_nonzero(image) for image in images) < 600


def test_the_background_is_left_out_of_tests_too_but_where_all_pixels_are_tokens():
    vectors = some(32, 6, 3)
    recipe = recipe_of(DRAWN, 0)
    packed = pack_vectors(recipe, vectors)
    live = packed.ids[packed.ids >= 0]
    assert live.min() >= DRAWN.floor and len(live) == np.count_nonzero(render(vectors) >= DRAWN.floor)
    whole = pack_vectors(replace(recipe, background="keep"), vectors)
    assert sorted(whole.ids.flatten().tolist()) == sorted(render(vectors).flatten().tolist())


def test_images_are_those_of_their_indices():
    recipe = recipe_of(CONFIG, 1)
    batch = make(recipe, 2)
    labels = [int(drawn(32, 9, recipe.seed, image_index(1, 2, place)).labels[0]) for place in range(batch.images)]
    assert batch.labels.tolist() == labels


def test_paths_of_several_lengths_take_turns():
    mixed = replace(CONFIG.curriculum[1], also=[6, 14])
    assert mixed.name == "32/cl9+6+14"
    recipe = recipe_of(replace(CONFIG, curriculum=(mixed,)), 0)
    batch = make(recipe, 2)
    lengths = [(9, 6, 14)[place % 3] for place in range(batch.images)]
    assert batch.images > 3
    for place, length in enumerate(lengths):
        image = render(drawn(32, length, recipe.seed, image_index(0, 2, place)))[0]
        pixels = batch.ids[0].reshape(-1, 32)[batch.blocks[place][batch.blocks[place] < 64]]
        assert (pixels > 0).sum() == np.count_nonzero(image)
    alone = draw_and_pack(recipe, 0, 2)
    assert alone.labels.tolist() == [int(drawn(32, 9, recipe.seed, index).labels[0]) for index in range(2)]


def test_whole_images_fill_a_step():
    keeps = replace(STAGE, background="keep", tokens=4000)
    batch = make(recipe_of(replace(CONFIG, curriculum=(keeps,), registers=4), 0), 0)
    assert batch.ids.shape == (3, 1024 + 32)
    assert not batch.tiles
    assert batch.tokens == 3 * (1024 + 4)
    assert int((batch.ids >= LEVELS).sum()) == 12


def test_the_stream_does_not_depend_on_its_workers_and_begins_anywhere(there):
    config = replace(CONFIG, auxiliary=1.0)
    recipe = recipe_of(config, 0)
    with Stream(0) as here:
        alone, ahead = here.batches(recipe, 0), there.batches(recipe, 0)
        first = [(next(alone), next(ahead)) for _ in range(5)]
        later = there.batches(recipe, 3)
        assert all(same(a, b) for a, b in first)
        assert same(next(later), first[3][0])
        assert not same(first[0][0], first[1][0])
        ahead.close()
        assert same(next(there.batches(recipe_of(config, 1), 0)), make(recipe_of(config, 1), 0))


def test_stages_steps_and_runs_have_images_of_their_own():
    again = Config(curriculum=(STAGE, STAGE), layers="near:6,rows:1", block=32)
    batches = [make(recipe_of(again, stage), step) for stage in (0, 1) for step in (0, 1)]
    batches.append(make(recipe_of(replace(again, seed=1), 0), 0))
    batches.append(make(recipe_of(again, 0, earlier=1), 0))
    assert len({batch.ids.tobytes() for batch in batches}) == 6


def test_validation_images_are_those_of_the_validation_seed(there):
    recipe = recipe_of(replace(CONFIG, auxiliary=1.0), 0)
    packings = there.validation(recipe, 5)()
    assert sum(packed.images for packed in packings) == 5
    assert images_at_once(recipe) == 2 == packings[0].images
    labels = [int(drawn(32, 6, VALIDATION_SEED, index).labels[0]) for index in range(5)]
    assert np.concatenate([packed.labels for packed in packings]).tolist() == labels
    assert all(packed.pixel_labels is None for packed in packings)


def test_vectors_of_a_file_become_the_same_tokens():
    recipe = recipe_of(CONFIG, 0)
    vectors = some(32, 6, 6)
    part, whole = pack_vectors(recipe, vectors, 2, 4), pack_vectors(recipe, vectors)
    assert part.images == 2
    first = int(whole.blocks[2, 0]) * 32
    assert np.array_equal(part.ids[0], whole.ids[0, first : first + part.ids.shape[1]])


@pytest.mark.parametrize(
    ("settings", "change", "text"),
    [
        (STAGE, {"size": 48}, "size must be one of 32"),
        (STAGE, {"contour": 15}, "contour must be one of"),
        (STAGE, {"steps": None}, "must have minutes or steps"),
        (STAGE, {"until": 0.5}, "accuracy must be above 0.5"),
        (STAGE, {"background": "mask"}, "background must be one of"),
        (STAGE, {"tokens": 0}, "tokens must be more than 0"),
        (STAGE, {"layers": "nothing"}, "mask must be one of"),
        (CONFIG, {"curriculum": (replace(STAGE, tokens=512),)}, "room for an image, 1024 tokens"),
        (CONFIG, {"curriculum": (replace(STAGE, layers="dense"),)}, "must have 2 layers"),
        (CONFIG, {"registers": 33}, "registers must be from 0"),
        (CONFIG, {"precision": "fp16"}, "precision must be"),
        (CONFIG, {"average": 1.0}, "average must be"),
        (CONFIG, {"auxiliary": -1.0}, "auxiliary must be"),
        (CONFIG, {"log_every": 0}, "log_every must be"),
        (CONFIG, {"checkpoint_minutes": 0}, "checkpoint_minutes must be more than 0; got 0"),
        (DRAWN, {"strokes": "third"}, "strokes must be one of original, second; got 'third'"),
        (DRAWN, {"strokes": "original,"}, "strokes must be one of original, second; got ''"),
        (DRAWN, {"strokes": "second", "release": "lra"}, "strokes=second are drawn, and a release's images are not"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, change, text):
    with pytest.raises(ValueError, match=text):
        replace(settings, **change)


def test_a_stage_of_fixed_images_repeats_them_in_other_renderings():
    stage = replace(STAGE, images=5)
    recipe = recipe_of(replace(DRAWN, curriculum=(stage,)), 0)
    plain = recipe_of(replace(CONFIG, curriculum=(stage,)), 0)
    levels = {tuple(np.sort(render(drawn(32, 6, recipe.seed, image_index(0, 0, n)))[0].ravel())) for n in range(5)}
    batch = make(plain, 7)
    for blocks in batch.blocks:
        ids = batch.ids[0].reshape(-1, 32)[blocks[blocks < 64]]
        image = np.zeros(32 * 32, np.uint8)
        image[: (ids > 0).sum()] = ids[ids > 0]
        assert tuple(np.sort(image)) in levels
    assert not same(make(recipe, 7), make(recipe, 8))
    assert same(make(recipe, 7), make(recipe, 7))


STROKES = replace(
    DRAWN, strokes="original,second", curriculum=(Stage(size=64, contour=3, tokens=4096, lr=1e-3, steps=5),)
)


@pytest.mark.parametrize("renderings", [False, True])
def test_batches_of_two_strokes_have_both_and_depend_on_seed_and_step_alone(renderings):
    recipe = recipe_of(replace(STROKES, renderings=renderings, auxiliary=0.5), 0)
    first = make(recipe, 1)
    assert same(first, make(recipe, 1)) and not same(first, make(recipe, 2))
    indices = [image_index(0, 1, place) for place in range(first.images)]
    drawings = [drawing_of(recipe, 3, index) for index in indices]
    kinds = {type(drawing).__name__ for drawing in drawings}
    assert kinds == {"Original", "Other"}
    assert first.labels[: first.images].tolist() == [drawing.label for drawing in drawings]


def test_strokes_of_the_original_alone_are_the_images_of_before():
    recipe = recipe_of(CONFIG, 0)
    drawing = drawing_of(recipe, 6, 5)
    assert isinstance(drawing, Original)
    assert np.array_equal(drawing.image(), render(drawn(32, 6, recipe.seed, 5))[0])


def test_test_images_of_other_strokes_are_not_those_of_training():
    recipe = replace(recipe_of(replace(STROKES, strokes="second", renderings=False), 0), floor=1)
    tested, trained = pack_strokes(recipe, "second", 0, 8), draw_and_pack(recipe, 0, 8)
    assert tested.images == trained.images == 8
    assert not np.array_equal(tested.ids[:, :1000], trained.ids[:, :1000])
