import json

import numpy as np
import pytest
import torch

from experiments.lra.baselines import baselines
from experiments.lra.data.examples import in_memory
from experiments.lra.no_attention import results
from experiments.lra.no_attention.bags import features, keys
from experiments.lra.no_attention.linear import fitted
from experiments.lra.no_attention.network import Length, trained
from experiments.lra.tasks import TASKS, load
from experiments.lra.tasks.task import Data
from tests.experiments.lra.commands import call
from tests.experiments.lra.tasks.released_files import write_text

CPU = torch.device("cpu")


def data_of(task, rows, folder):
    splits = [in_memory(rows(seed), shift=1) for seed in range(3)]
    return Data(TASKS[task], folder, f"{task} for tests", False, *splits)


def by_order(seed, count=300):
    """Label 1 has its letters in ascending order, label 0 in descending order: a bag of single letters is the same."""
    random = np.random.default_rng(seed)
    for i in range(count):
        letters = np.sort(random.integers(97, 123, 40)).astype(np.uint8)
        yield i % 2, ((letters if i % 2 else letters[::-1]).tobytes(),)


def by_letter(seed, count=300):
    random = np.random.default_rng(seed)
    for i in range(count):
        letters = random.integers(97, 123, random.integers(20, 60)).astype(np.uint8)
        letters[random.integers(0, len(letters), 5)] = 48 + i % 2
        yield i % 2, (letters.tobytes(),)


def pairs(seed, count=300):
    random = np.random.default_rng(seed)
    for i in range(count):
        one, other = random.choice(26, 2, replace=False) + 97
        yield i % 2, (bytes([one]) * 20, bytes([one if i % 2 else other]) * 20)


def test_a_bag_does_not_see_order_and_runs_do(tmp_path):
    data = data_of("text", by_order, tmp_path)
    assert fitted(data, 1).accuracy < 0.6
    assert fitted(data, 4).accuracy > 0.98


def test_a_bag_sees_single_tokens_and_pairs(tmp_path):
    found = fitted(data_of("text", by_letter, tmp_path), 1, most=200)
    assert found.accuracy > 0.98
    assert (found.examples, found.parameters) == (200, 257)
    assert found.validation > 0.95
    assert fitted(data_of("books-matching", pairs, tmp_path), 1).accuracy > 0.98


def test_equal_runs_have_equal_columns():
    found = keys(np.frombuffer(b"abcabc", np.uint8), 3, 2**18)
    assert len(found) == 6 + 5 + 4
    assert found[:3].tolist() == found[3:6].tolist()
    assert found[6:8].tolist() == found[9:11].tolist()
    assert found[11] == found[14]
    assert len(set(found.tolist())) == 9
    assert found.min() >= 0 and found.max() < 2**18


def test_a_row_is_cut_and_has_length_one():
    examples = in_memory([(0, (b"aab" + b"z" * 50,))], shift=1)
    row = features(examples, 3, 1).toarray()[0]
    assert np.flatnonzero(row).tolist() == [97, 98]
    assert row @ row == pytest.approx(1)
    assert row[97] / row[98] == pytest.approx(np.log(3) / np.log(2))


@pytest.mark.parametrize(("task", "rows"), [("text", by_letter), ("books-matching", pairs)])
def test_the_network_learns_a_sequence(task, rows, tmp_path):
    found = trained(data_of(task, rows, tmp_path), Length(steps=150), 0, CPU)
    assert found.accuracy > 0.9
    assert found.examples == 150 * 64


def test_the_network_learns_an_image(tmp_path):
    def rows(seed):
        random = np.random.default_rng(seed)
        for i in range(100):
            picture = random.integers(0, 50, (32, 32), np.uint8)
            picture[:, 3 * (i % 10) : 3 * (i % 10) + 3] += 100
            yield i % 10, (picture.tobytes(),)

    assert trained(data_of("image", rows, tmp_path), Length(steps=60), 0, CPU).accuracy > 0.9


def test_a_network_without_an_end_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a network needs an end: give --minutes or --steps"):
        trained(data_of("text", by_letter, tmp_path), Length(), 0, CPU)


def test_a_stored_figure_stands_beside_results_on_the_same_splits_alone(tmp_path, monkeypatch):
    write_text(tmp_path, reviews=40)
    record = tmp_path / "no-attention-of-a-test.jsonl"
    options = {"rows": "text", "device": "cpu", "record": record, "steps": 2, "seeds": "0,1", "commit": "abc"}
    result = call("no-attention", "--data", f"text={tmp_path}", rules="bag,cnn", **options)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    names = [line["name"] for line in lines[1:]]
    assert names == ["lra/text/accuracy/no-attention/bag-of-tokens", "lra/text/accuracy/no-attention/small-cnn"]
    assert str(tmp_path) not in record.read_text()
    cnn = lines[2]
    assert cnn["value"] == pytest.approx(np.mean(cnn["settings"]["runs"])) and cnn["seeds"] == 2
    monkeypatch.setattr(results.stored, "__defaults__", (tmp_path,))
    data = load("text", tmp_path)
    found = {each.rule: each.accuracy for each in baselines(data)}
    assert found == {
        "majority class": 0.5,
        "bag of tokens": lines[1]["value"] / 100,
        "small CNN": pytest.approx(cnn["value"] / 100),
    }
    assert [each.rule for each in baselines(data_of("text", by_letter, tmp_path))] == ["majority class"]


def test_runs_of_pixels_are_refused(tmp_path):
    data = data_of("image", lambda seed: [(0, (bytes(1024),))], tmp_path)
    with pytest.raises(ValueError, match="runs are of sequences; image has images: leave out runs"):
        results.measured(data, "runs", (0,), Length(), CPU)


def test_an_unknown_model_is_refused(tmp_path):
    write_text(tmp_path)
    result = call(
        "no-attention",
        "--data",
        f"text={tmp_path}",
        rows="text",
        rules="rnn",
        device="cpu",
        record=tmp_path / "a.jsonl",
    )
    assert result.exit_code == 2
    assert "a model without attention must be one of bag, runs, cnn; got 'rnn'" in " ".join(result.output.split())
