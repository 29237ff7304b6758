import json

import pytest

from experiments.pathfinder import generate as generating
from experiments.pathfinder import testset


@pytest.fixture
def few_images(monkeypatch):
    monkeypatch.setattr(testset, "IMAGES", 20)
    monkeypatch.setattr(generating, "IMAGES_PER_PART", 10)


def test_a_test_set_is_checked_by_its_hash(tmp_path, few_images):
    hashes = tmp_path / "hashes.json"
    with pytest.raises(ValueError, match="no known hash"):
        testset.test_set(32, 6, tmp_path, workers=1, hashes=hashes)
    path = testset.test_set(32, 6, tmp_path, workers=1, hashes=hashes, record=True)
    assert testset.test_set(32, 6, tmp_path, workers=1, hashes=hashes) == path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="must have the SHA-256"):
        testset.test_set(32, 6, tmp_path, workers=1, hashes=hashes, record=True)
    path.unlink()
    assert testset.test_set(32, 6, tmp_path, workers=1, hashes=hashes) == path


def test_all_folds_have_a_known_hash():
    known = json.loads(testset.HASHES.read_text())
    arena = [(size, contour) for size in (32, 64, 128, 256) for contour in (6, 9, 14)]
    assert known.keys() == {testset.settings_of(*fold).name for fold in (*arena, *testset.BEYOND)}
    assert len(set(known.values())) == 13
