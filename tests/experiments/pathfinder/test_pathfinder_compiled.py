import numba
import pytest

from experiments.pathfinder import compiled as module
from experiments.pathfinder.compiled import HERE, cache_folder, compiled


def double(x):
    return 2 * x


@pytest.fixture(autouse=True)
def _no_memory():
    cache_folder.cache_clear()
    yield
    cache_folder.cache_clear()


def test_machine_code_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert compiled(double)(21) == 42
    assert list(tmp_path.glob("numba-*/*/*.nbc"))
    assert str(tmp_path) == numba.config.CACHE_DIR


def test_another_state_of_the_sources_has_another_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    for path in HERE.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(module, "HERE", tmp_path)
    first = cache_folder()
    with open(tmp_path / "rng.py", "a") as file:
        file.write("# changed\n")
    cache_folder.cache_clear()
    assert cache_folder() != first


def test_without_a_place_for_the_cache_functions_are_compiled_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file"))
    assert cache_folder() is None
    function = compiled(double)
    assert function(21) == 42
    assert function.signatures
