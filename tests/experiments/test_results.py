"""What is stored of results: tables, pictures, settings and thinned logs, and no large file but two models."""

from pathlib import Path

import experiments
from experiments.training.run_log import MOST_TRAINING, read

RESULTS = Path(experiments.__file__).parent / "results"
LOGS = sorted(RESULTS.rglob("log.jsonl"))
LARGE = 1_000_000  # bytes


def test_no_file_is_large_but_two_models():
    large = [path for path in RESULTS.rglob("*") if path.is_file() and path.stat().st_size > LARGE]
    assert {path.name for path in large} <= {"model.safetensors"}
    assert len(list(RESULTS.rglob("*.safetensors"))) <= 2


def test_logs_are_thinned():
    assert LOGS
    for path in LOGS:
        training = [record for record in read(path) if record["kind"] == "train"]
        assert len(training) <= MOST_TRAINING, f"{path}: python -m experiments.training thin experiments/results"


def test_the_page_of_results_names_every_folder():
    text = (RESULTS / "README.md").read_text()
    assert [each.name for each in RESULTS.iterdir() if each.is_dir() and f"({each.name}/" not in text] == []
