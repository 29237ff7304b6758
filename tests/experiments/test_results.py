"""The stored results: one file a run, pages of a few minutes, and no large file but two models."""

from pathlib import Path

import pytest

import experiments
from experiments.measurements import read

RESULTS = Path(experiments.__file__).parent / "results"
FILES = [path for path in sorted(RESULTS.rglob("*")) if path.is_file()]
RUNS = [path for path in FILES if path.suffix == ".jsonl" and path.read_text().startswith('{"run":')]
LARGE = 250_000  # bytes
MOST_FILES, MOST_BYTES, MOST_WORDS = 150, 6 * 2**20, 1_500


def test_the_store_is_small():
    assert len(FILES) < MOST_FILES
    assert sum(path.stat().st_size for path in FILES) < MOST_BYTES
    large = [path for path in FILES if path.stat().st_size > LARGE]
    assert {path.name for path in large} == {"model.safetensors"}
    assert len(large) == 2


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".md"], ids=lambda path: path.name)
def test_a_page_can_be_read_in_a_few_minutes(path):
    assert len(path.read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_run_has_its_names_once_and_they_begin_with_the_folder(path):
    run, measured = read(path)
    names = [each.name for each in measured]
    assert names and len(names) == len(set(names))
    assert {name.partition("/")[0] for name in names} == {path.parent.name}
    assert run.device and run.commit and run.date and run.command


def test_the_page_of_results_names_every_folder():
    text = (RESULTS / "README.md").read_text()
    assert [each.name for each in RESULTS.iterdir() if each.is_dir() and each.name not in text] == []
    runs = [path for path in RUNS if path.parent.name not in ("tune",)]
    assert [path.name for path in runs if path.stem not in text and path.stem.partition("-")[0] not in text] == []
