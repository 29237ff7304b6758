import json

import numpy as np
import pytest
import torch
from rich.console import Console

from experiments.lra.baselines import baselines
from experiments.lra.data.examples import in_memory
from experiments.lra.no_attention import results
from experiments.lra.no_attention.bags import features, keys
from experiments.lra.no_attention.linear import fitted
from experiments.lra.no_attention.measure import measured
from experiments.lra.no_attention.network import configured, network
from experiments.lra.table.rows import rendered
from experiments.lra.tasks import TASKS, load
from experiments.lra.tasks.task import Data
from experiments.training.optimizer import adamw
from tests.experiments.lra.commands import call
from tests.experiments.lra.tasks.released_files import write_text

CPU = torch.device("cpu")
QUIET = Console(quiet=True)
TINY = {"device": "cpu", "precision": "fp32", "width": 16, "warmup": 10, "batch": 16, "dropout": 0.0}


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


def trained(task, rows, folder, seeds=(0,), **settings):
    config = configured("rules", {**TINY, **settings, "task": task})
    return list(measured(data_of(task, rows, folder), "cnn", config, seeds, QUIET))


@pytest.mark.parametrize(("task", "rows"), [("text", by_order), ("books-matching", pairs)])
def test_the_network_learns_a_sequence(task, rows, tmp_path):
    (found,) = trained(task, rows, tmp_path, steps=100, mlp=32, depth=5, lr=3e-3)
    assert found.value > 90
    assert (found.settings["steps"], found.settings["batch"], found.settings["helps"]) == (100, 16, "none")


def striped(seed, count=200):
    """Stripes from left to right, or from top to bottom, which a bag of pixels does not tell apart."""
    random = np.random.default_rng(seed)
    for i in range(count):
        picture = random.integers(0, 50, (32, 32), np.uint8)
        picture[random.integers(4) :: 4] += 100
        yield i % 2, ((picture if i % 2 else picture.T).tobytes(),)


def test_the_network_learns_an_image_with_the_help_of_the_transformers(tmp_path):
    helps = {"cutmix": 0.5, "label_smoothing": 0.1}
    (found,) = trained("image", striped, tmp_path, steps=40, lr=3e-3, **helps)
    assert found.value > 90
    assert found.settings["helps"] == "squares of other images, smoothed labels"


def test_seeds_are_listed_and_a_seed_repeats_itself(tmp_path):
    first, both = trained("text", by_letter, tmp_path, (0, 1), steps=8, mlp=16, depth=5)
    (again,) = trained("text", by_letter, tmp_path, (1,), steps=8, mlp=16, depth=5)
    assert first.settings["runs"] == both.settings["runs"][:1] and first.seeds is None
    assert both.settings["runs"][1:] == again.settings["runs"] != first.settings["runs"]
    assert (both.seeds, both.settings["run_seeds"]) == (2, [0, 1])
    assert both.value == pytest.approx(np.mean(both.settings["runs"]))


@pytest.mark.parametrize(
    ("task", "least", "most"), [("text", 3.2, 3.6), ("books-matching", 3.6, 4.0), ("image", 3.2, 3.6)]
)
def test_the_networks_are_as_large_as_the_transformers(task, least, most):
    with torch.device("meta"):
        model = network(configured("best", {"task": task}), TASKS[task], torch.device("meta"))
    assert least < sum(each.numel() for each in model.parameters()) / 1e6 < most


@pytest.mark.parametrize("task", ["text", "image"])
def test_weights_of_convolutions_decay_and_embeddings_norms_and_biases_do_not(task):
    model = network(configured("rules", {**TINY, "task": task}), TASKS[task], CPU)
    decayed = {id(each) for each in adamw(model, 1e-3, 0.1).param_groups[0]["params"]}
    for name, each in model.named_parameters():
        assert (id(each) in decayed) == (each.ndim > 1 and name != "embedding.weight"), name


def test_padding_changes_no_answer():
    model = network(configured("rules", {**TINY, "task": "text"}), TASKS["text"], CPU).eval()
    ids = torch.randint(1, 257, (1, 77))
    lengths = torch.tensor([77])
    for more in (1, 16, 51):
        padded = torch.nn.functional.pad(ids, (0, more))
        torch.testing.assert_close(model(padded, lengths), model(ids, lengths), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(ids, lengths), model(ids, lengths - 1))


def test_a_stored_figure_stands_beside_results_on_the_same_splits_alone(tmp_path, monkeypatch):
    write_text(tmp_path, reviews=40)
    record = tmp_path / "no-attention-of-a-test.jsonl"
    options = {"rows": "text", "device": "cpu", "record": record, "commit": "abc", "seeds": "0,1", "steps": 2}
    options |= {"width": 8, "depth": 2, "batch": 4, "precision": "fp32"}
    result = call("no-attention", "--data", f"text={tmp_path}", rules="bag,cnn", **options)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    names = [line["name"] for line in lines[1:]]
    assert names == ["lra/text/accuracy/no-attention/bag-of-tokens", "lra/text/accuracy/no-attention/small-cnn"]
    assert str(tmp_path) not in record.read_text()
    cnn = lines[2]
    assert cnn["value"] == pytest.approx(np.mean(cnn["settings"]["runs"])) and cnn["seeds"] == 2
    page = rendered(tmp_path).splitlines()
    best = max(lines[1:], key=lambda line: line["value"])
    assert f"| {best['value']:.1f}" in next(line for line in page if line.startswith("| text | - | 0 | - |"))
    assert sum(line.startswith("| text | no-attention | small-cnn |") for line in page) == 1
    assert any("convolutions alone were trained on text." in line for line in page)
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
        next(measured(data, "runs", configured("rules", {"task": "image"}), (0,), QUIET))


@pytest.mark.parametrize(
    ("rules", "options", "message"),
    [
        ("rnn", {}, "a model without attention must be one of bag, runs, cnn; got 'rnn'"),
        ("cnn", {"batch": 8}, "a network needs an end: give --minutes or --steps"),
        ("bag", {"steps": 8}, "--steps is for --rules cnn; got bag"),
        ("cnn", {"steps": 8, "cutmix": 0.5}, "cutmix=0.5 is for images; the task is text"),
    ],
)
def test_what_cannot_be_trained_is_refused(rules, options, message, tmp_path):
    write_text(tmp_path)
    options |= {"rows": "text", "rules": rules, "device": "cpu", "record": tmp_path / "a.jsonl"}
    result = call("no-attention", "--data", f"text={tmp_path}", **options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
