import json
from pathlib import Path
from statistics import mean, stdev

import pytest

import experiments
from experiments.measurements import read

RESULTS = Path(experiments.__file__).parent / "results"
FILES = [path for path in sorted(RESULTS.rglob("*")) if path.is_file()]
RUNS = [path for path in FILES if path.suffix == ".jsonl" and path.read_text().startswith('{"run":')]
LARGE = 250_000
MOST_FILES, MOST_BYTES, MOST_WORDS = 150, 2 * 2**20, 1_500


def test_the_store_is_small():
    assert len(FILES) < MOST_FILES
    assert sum(path.stat().st_size for path in FILES) < MOST_BYTES
    assert [path for path in FILES if path.stat().st_size > LARGE] == []


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


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_mean_is_over_all_seeds_and_its_spread_their_deviation(path):
    for each in read(path)[1]:
        runs = each.settings.get("runs", [])
        runs = runs if isinstance(runs, list) else []
        assert (each.spread_of == "seeds") == (len(runs) > 1), each.name
        if len(runs) > 1:
            assert len(runs) == each.seeds, each.name
            assert each.value == pytest.approx(mean(runs), rel=1e-4), each.name
            deviation = stdev(runs) / mean(runs) if mean(runs) else 0.0
            assert each.spread == pytest.approx(deviation, rel=1e-2, abs=1e-4), each.name


def test_every_stored_run_of_path_x_is_in_its_mean():
    stored = {each.name: each for each in read(RESULTS / "pathx" / "models.jsonl")[1]}
    tested = {"path-x": ("", "128-14-drop"), "path-256": ("path256-", "256-14-drop")}
    for task, (prefix, key) in tested.items():
        name = f"{prefix}label-free-tiles16x5-butterfly8x4"
        files = [
            RESULTS.parent / "weights" / task / "model.json",
            *sorted((RESULTS / "pathx" / "runs").glob(f"{name}-seed*.json")),
        ]
        found = [100 * json.loads(file.read_text())["results"][key]["accuracy"] for file in files]
        assert sorted(stored[f"pathx/{task}/accuracy/labels-alone/block-sparse"].settings["runs"]) == pytest.approx(
            sorted(found)
        )


def test_the_page_of_results_names_every_folder():
    text = (RESULTS / "README.md").read_text()
    assert [each.name for each in RESULTS.iterdir() if each.is_dir() and each.name not in text] == []
    runs = [path for path in RUNS if path.parent.name not in ("tune",)]
    assert [path.name for path in runs if path.stem not in text and path.stem.partition("-")[0] not in text] == []
