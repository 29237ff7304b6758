from dataclasses import replace

import numpy as np
import pytest

from experiments.pathfinder import generate as module
from experiments.pathfinder.draw import draw
from experiments.pathfinder.generate import Settings, generate
from experiments.pathfinder.parameters import lra
from experiments.pathfinder.vectors import load

SMALL = Settings(lra(32, 6), images=1100, seed=3)  # three parts


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return generate(SMALL, tmp_path_factory.mktemp("data"), workers=1)


def test_file_says_what_it_is(path):
    assert path.name == "pathfinder32-cl6-generated-1100-seed3.safetensors"
    assert b"generated Pathfinder images" in path.read_bytes()[:2000]
    assert [other.name for other in path.parent.iterdir()] == [path.name]


def test_images_are_those_of_their_numbers(path):
    vectors = load(path)
    assert len(vectors) == 1100
    for index in (0, 499, 500, 1099):
        dashes = slice(vectors.starts[index], vectors.starts[index + 1])
        drawing = draw(SMALL.parameters, 3, index)
        assert np.array_equal(vectors.places[dashes], drawing.dashes[:, :2])
        assert np.array_equal(vectors.headings[dashes], drawing.dashes[:, 2])
        assert (vectors.labels[index], vectors.attempts[index]) == (drawing.label, drawing.attempts)


def test_number_of_workers_changes_nothing(path, tmp_path):
    seen = []
    other = generate(SMALL, tmp_path, workers=2, progress=seen.append)
    assert other.read_bytes() == path.read_bytes()
    assert seen[0] == 0 and seen[-1] == 1100 and seen == sorted(seen)


def test_a_smaller_file_begins_with_the_same_images(path, tmp_path):
    few, many = load(generate(Settings(lra(32, 6), 40, 3), tmp_path, workers=1)), load(path)
    assert np.array_equal(few.places, many.places[: few.starts[-1]])


def test_stopped_run_goes_on_where_it_was(path, tmp_path, monkeypatch):
    def stop(done):
        if done == 1000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(SMALL, tmp_path, workers=1, progress=stop)
    assert [part.name for part in tmp_path.iterdir()] == ["pathfinder32-cl6-generated-1100-seed3.unfinished"]
    drawn = []
    monkeypatch.setattr(module, "draw", lambda p, seed, index: drawn.append(index) or draw(p, seed, index))
    seen = []
    resumed = generate(SMALL, tmp_path, workers=1, progress=seen.append)
    assert drawn == list(range(1000, 1100)) and seen == [1000, 1100]
    assert resumed.read_bytes() == path.read_bytes()
    assert list(tmp_path.iterdir()) == [resumed]


def test_complete_file_is_left_alone(path):
    before = path.stat().st_mtime_ns
    assert generate(SMALL, path.parent, workers=1) == path
    assert path.stat().st_mtime_ns == before


def test_error_in_a_worker_reaches_the_caller(tmp_path):
    impossible = Settings(replace(lra(64, 6), padding=40), 600)
    with pytest.raises(ValueError, match="no target snake can begin"):
        generate(impossible, tmp_path, workers=2)
    assert not list(tmp_path.glob("*.safetensors"))


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="images must be at least 1; got 0"):
        Settings(lra(32, 6), 0)
    with pytest.raises(ValueError, match="seed must be from 0 to 2\\^63 - 1; got -1"):
        Settings(lra(32, 6), 1, -1)
