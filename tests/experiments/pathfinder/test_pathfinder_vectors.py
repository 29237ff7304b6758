from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments.pathfinder import vectors as vectors_module
from experiments.pathfinder.draw import draw
from experiments.pathfinder.parameters import lra
from experiments.pathfinder.vectors import KIND, array_types, collect, join, load, save
from tests.experiments.pathfinder.parameters import OTHER

P = lra(128, 6)


@pytest.fixture(scope="module")
def drawings():
    return [draw(P, 2, index) for index in range(30)]


@pytest.fixture(scope="module")
def vectors(drawings):
    return collect(P, 2, drawings)


def same(first, second):
    arrays = array_types(first.parameters)
    equal = all(np.array_equal(getattr(first, name), getattr(second, name)) for name in arrays)
    return equal and (first.parameters, first.seed) == (second.parameters, second.seed)


def test_round_trip(vectors, tmp_path):
    save(vectors, tmp_path / "new" / "file.safetensors")
    assert same(load(tmp_path / "new" / "file.safetensors"), vectors)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.safetensors"]


def test_an_image_of_the_hardest_path_x_fold_takes_less_than_400_bytes():
    vectors = collect(lra(128, 14), 0, [draw(lra(128, 14), 0, index) for index in range(20)])
    assert sum(getattr(vectors, name).nbytes for name in array_types(P)) / 20 < 400


def test_ground_truth_is_the_drawings(vectors, drawings):
    assert len(vectors) == 30
    for index, drawing in enumerate(drawings):
        first, second = drawing.dashes[:6], drawing.dashes[6:12]
        assert np.array_equal(vectors.places[vectors.targets[index, 1]], second[:, :2])
        assert np.array_equal(vectors.tips[index, 0], first[[0, -1], :2])
        assert vectors.distractors[index] == (len(drawing.dashes) - 12) / 2
        snakes = first, second
        last = drawing.marked if drawing.label else 1 - drawing.marked
        assert vectors.markers[index].tolist() == [
            snakes[drawing.marked][0, :2].tolist(),
            snakes[last][-1, :2].tolist(),
        ]
    assert set(vectors.labels) == set(vectors.marked) == {0, 1}
    assert set(vectors.margins) == {2, 3}


def test_parts_join_to_the_whole(vectors, drawings):
    assert same(join([collect(P, 2, drawings[:7]), collect(P, 2, []), collect(P, 2, drawings[7:])]), vectors)
    with pytest.raises(ValueError, match="parts must have the same parameters and seed"):
        join([vectors, replace(vectors, seed=3)])
    with pytest.raises(ValueError, match="parts must hold at least one element"):
        join([])


def test_large_images_have_wider_coordinates(tmp_path):
    p = replace(OTHER, size=300)
    vectors = collect(p, 0, [draw(p, 0, index) for index in range(20)])
    assert vectors.places.dtype == np.uint16 and vectors.places.max() > 255
    save(vectors, tmp_path / "file.safetensors")
    assert same(load(tmp_path / "file.safetensors"), vectors)


def test_missing_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`python -m experiments\.pathfinder generate` writes one"):
        load(tmp_path / "none.safetensors")
    (tmp_path / "text").write_text("no vectors")
    with pytest.raises(
        ValueError, match="text must be a file of generated Pathfinder images as vectors; got ValueError: "
    ):
        load(tmp_path / "text")
    save_file({"weights": np.zeros(3)}, tmp_path / "model")
    with pytest.raises(ValueError, match=f"model must hold {KIND}; got None"):
        load(tmp_path / "model")


def test_cut_file_is_refused(vectors, tmp_path):
    path = tmp_path / "file"
    save(vectors, path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(
        ValueError, match="file must be a file of generated Pathfinder images as vectors; got ValueError: "
    ):
        load(path)


def test_file_of_another_format_or_of_other_stamps_is_refused(vectors, tmp_path, monkeypatch):
    path = tmp_path / "file"
    save(vectors, path)
    monkeypatch.setattr(vectors_module, "FORMAT", 2)
    with pytest.raises(ValueError, match="file must have format 2, the one this version reads; got 1"):
        load(path)
    monkeypatch.undo()
    monkeypatch.setattr(vectors_module, "digest", lambda parameters: "other")
    with pytest.raises(ValueError, match=r"was drawn with stamps .*, and these are other.*Pillow"):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(labels=a["labels"].astype(np.int64)), "must hold the arrays"),
        (lambda a: a.pop("marked"), "must hold the arrays"),
        (lambda a: a.update(marked=a["marked"][1:]), "its arrays' shapes do not belong together"),
        (lambda a: a.update(places=a["places"][:, :1].copy()), "its arrays' shapes do not belong together"),
        (lambda a: a["starts"].__setitem__(-1, 5), r"its images must have \d+ dashes; got 5"),
        (lambda a: a["starts"].__setitem__(1, 7), "two whole targets and whole distractors"),
        (lambda a: a["starts"].__setitem__(1, a["starts"][1] + 1), "two whole targets and whole distractors"),
        (lambda a: a["labels"].__setitem__(0, 2), "impossible labels, marked snakes or margins"),
        (lambda a: a["margins"].__setitem__(0, 1), "impossible labels, marked snakes or margins"),
        (lambda a: a["places"].__setitem__(0, 128), "it has dashes outside the image"),
        (lambda a: a["headings"].__setitem__(0, 409), "it has impossible headings"),
    ],
)
def test_damaged_arrays_are_refused(vectors, tmp_path, change, message):
    path = tmp_path / "file"
    save(vectors, path)
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        about = file.metadata()
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path, metadata=about)
    with pytest.raises(ValueError, match=message):
        load(path)
