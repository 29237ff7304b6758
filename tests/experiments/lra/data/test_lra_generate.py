import csv
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import experiments
from experiments.lra.data.listops.generator import SPLITS, Settings, draw_chunk, generate
from experiments.lra.data.listops.grammar import NAMES, evaluate, render
from experiments.training import workers

ROOT = Path(experiments.__file__).parents[1]
SMALL = Settings(10, 60, train=300, val=20, test=30, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return generate(SMALL, tmp_path_factory.mktemp("data"), workers=1)


def rows(path):
    with open(path, newline="") as file:
        return list(csv.reader(file, delimiter="\t"))


def test_files_have_the_released_format(folder):
    for split, size in zip(SPLITS, SMALL.sizes, strict=True):
        header, *examples = rows(folder / f"generated_{split}.tsv")
        assert header == ["Source", "Target"]
        assert len(examples) == size
        for source, target in examples:
            flat = [NAMES.index(word) for word in source.split() if word not in "()"]
            assert render(flat) == source
            assert str(evaluate(flat)) == target
            assert 10 < len(flat) < 60
    assert (folder / "generated_val.tsv").read_bytes().startswith(b"Source\tTarget\r\n")


def test_expressions_are_distinct_over_all_splits(folder):
    sources = [row[0] for split in SPLITS for row in rows(folder / f"generated_{split}.tsv")[1:]]
    assert len(set(sources)) == len(sources) == sum(SMALL.sizes)


def test_generated_data_says_so(folder):
    label = json.loads((folder / "generator.json").read_text())
    assert label["generated"] is True
    assert label["seed"] == 3
    assert "generated" in folder.name


def test_workers_end_with_a_killed_parent_and_work_on_at_a_signal_to_all():
    script = (
        "import os, signal\n"
        "from experiments.training.workers import leave_signals_to_parent, worker_pool\n"
        "if __name__ == '__main__':\n"
        "    pool = worker_pool(1, leave_signals_to_parent)\n"
        "    before = pool.submit(os.getpid).result()\n"
        "    for number in (signal.SIGINT, signal.SIGTERM):\n"
        "        pool.submit(signal.raise_signal, number).result()\n"
        "    print(pool.submit(os.getpid).result() == before, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The pipe closes when the workers, too, have ended.
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=workers.GRACE - 5
    )
    assert (done.stdout, done.returncode) == ("True\n", -signal.SIGKILL)


def test_number_of_workers_changes_nothing(folder, tmp_path):
    other = generate(SMALL, tmp_path, workers=2)
    for path in folder.glob("*.tsv"):
        assert path.read_bytes() == (other / path.name).read_bytes()


def test_seed_changes_everything():
    first, second = (dict(draw_chunk(Settings(10, 60, seed=seed), 0)) for seed in (0, 1))
    assert len(first.keys() & second.keys()) < 0.1 * len(first)


def test_complete_data_is_left_alone_and_progress_reaches_the_end(folder, tmp_path):
    before = (folder / "generator.json").stat().st_mtime_ns
    assert generate(SMALL, folder.parent, workers=1) == folder
    assert (folder / "generator.json").stat().st_mtime_ns == before
    seen = []
    generate(Settings(10, 60, 150, 5, 5), tmp_path, workers=1, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 160


def test_stopped_generation_leaves_nothing(tmp_path):
    def stop(written):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(SMALL, tmp_path, workers=1, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_bounds_that_allow_too_few_expressions_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.lra.data.listops.generator.DRAWS_PER_CHUNK", 100)
    with pytest.raises(ValueError, match="found only 10 distinct expressions longer than 0 and shorter than 3"):
        generate(Settings(0, 3, 30, 1, 1), tmp_path, workers=1)
    assert list(tmp_path.iterdir()) == []


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="strictly between the bounds: got longer than 5 and shorter than 6"):
        Settings(5, 6)
    with pytest.raises(ValueError, match="at least one expression"):
        Settings(train=0)


def test_chunks_depend_on_their_number_only():
    random.seed(1)
    first = draw_chunk(SMALL, 4)
    random.seed(2)
    assert draw_chunk(SMALL, 4) == first != draw_chunk(SMALL, 5)
