import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from experiments.lra import cli, weights
from experiments.lra.data.listops.generator import Settings, generate
from experiments.lra.evaluate import answers
from experiments.lra.tasks import load
from experiments.lra.train import Run
from experiments.pathfinder.bins import marker_distances
from experiments.pathfinder.generate import Settings as Images
from experiments.pathfinder.generate import generate as generate_images
from experiments.pathfinder.parameters import lra
from experiments.pathfinder.vectors import load as load_vectors
from experiments.training import tensor_files
from tests.experiments.lra.runs import DATA, TINY
from tests.experiments.lra.runs import TINY_IMAGES as CONFIG


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return generate(DATA, tmp_path_factory.mktemp("data"), workers=1)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    made = Run(TINY, load("listops", folder), tmp_path_factory.mktemp("evaluated") / "run")
    return made, made.train()


def call(*words):
    return CliRunner().invoke(cli.app, ["test", *map(str, words), "--device", "cpu"])


def evaluated(run, *words):
    result = call(run.folder, *words)
    assert result.exit_code == 0, result.output
    (path,) = (run.folder / "tests").iterdir()
    found = json.loads(path.read_text())
    path.unlink()
    return found, result.output


def check_groups(found):
    groups = found["kinds"]["groups"]
    assert sum(group["examples"] for group in groups) == found["test_examples"]
    right = sum(group["examples"] * group["accuracy"] for group in groups)
    assert right / found["test_examples"] == pytest.approx(found["test_accuracy"])


def test_answers_are_in_the_order_of_the_examples(run, folder):
    made, _ = run
    test = load("listops", folder).test
    lengths = (test.ends - test.begins)[:, 0]
    assert (np.diff(lengths) < 0).any()
    made.model.train()
    together, _ = answers(made.model, test, made.config, made.device, lambda tested: None)
    alone = [
        answers(made.model, test.take(np.array([row])), made.config, made.device, lambda tested: None)[0].item()
        for row in range(len(test))
    ]
    assert together.tolist() == alone
    assert len(set(alone)) == 2


def test_on_the_runs_own_data_it_is_what_the_run_said(run, folder):
    made, metrics = run
    found, output = evaluated(made, "--data", folder)
    assert found["test_accuracy"] == pytest.approx(metrics["test_accuracy"])
    assert found["test_loss"] == pytest.approx(metrics["test_loss"])
    assert found["baselines"] == metrics["baselines"]
    assert [{name: found["data"][name] for name in ("origin", "hash")}] == found["trained_on"] == [metrics["data"]]
    check_groups(found)
    assert "by root operator" in output and "majority class" in output


@pytest.mark.parametrize(("bits", "share", "rel"), [(16, 0.6, 1e-2), (8, 0.5, 3e-2)])
def test_stored_weights_answer_as_the_run_does_in_fewer_bytes(run, folder, tmp_path, bits, share, rel):
    made, metrics = run
    result = stored_in(tmp_path / "kept", made.folder, bits)
    assert result.exit_code == 0, result.output
    stored = tmp_path / "kept" / "model.safetensors"
    assert stored.stat().st_size < share * (made.folder / "model.safetensors").stat().st_size
    found = call(stored, "--data", folder, "--out", tmp_path / "all.json")
    assert found.exit_code == 0, found.output
    assert f"The run itself, on its own test split: {metrics['test_accuracy']:.3f}" in found.output
    every = json.loads((tmp_path / "all.json").read_text())
    assert every["accuracy_of_run"] == metrics["test_accuracy"]
    assert every["test_accuracy"] == pytest.approx(metrics["test_accuracy"], abs=1.5 / len(made.data.test))
    assert every["test_loss"] == pytest.approx(metrics["test_loss"], rel=rel)
    assert every["figure"] == f"lra/listops/accuracy/{bits}/butterfly"
    assert f"Its stored figure: {every['figure']}" in found.output
    again = stored_in(tmp_path / "kept", stored, bits)
    assert again.exit_code == 2 and "the folder must be another one than the run's" in again.output


def stored_in(folder, run, bits):
    words = ["--out", str(folder), "--bits", str(bits), "--figure", f"lra/listops/accuracy/{bits}/butterfly"]
    return CliRunner().invoke(cli.app, ["store", str(run), *words])


def test_weights_are_not_stored_in_other_bits(run, tmp_path):
    found = stored_in(tmp_path, run[0].folder, 4)
    assert found.exit_code == 2 and "bits must be 8 or 16; got 4" in found.output


def test_a_matrix_in_bytes_is_off_by_half_a_step_of_its_row(tmp_path):
    matrix = (
        torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-4, 1, 3, 100, 0])[:, None]
    )
    kept = weights.in_bytes("a", matrix)
    about = {"kind": weights.KIND, "config": {}, "cost": {}}
    tensor_files.write(tmp_path / "model.safetensors", kept, about)
    found = weights.read(tmp_path / "model.safetensors")[0]["a"]
    steps = matrix.abs().amax(1, keepdim=True) / 127
    assert ((found - matrix).abs() <= 0.51 * steps + 2**-14).all()
    tensor_files.write(tmp_path / "model.safetensors", {"a": kept["a"]}, about)
    with pytest.raises(ValueError, match=r"must be a file of an experiments\.lra model with a scale for each matrix"):
        weights.read(tmp_path / "model.safetensors")


def test_the_first_examples_are_tested_alone(run, folder):
    made, _ = run
    found, _ = evaluated(made, "--data", folder, "--examples", 9)
    assert found["test_examples"] == 9
    check_groups(found)
    together, _ = answers(made.model, load("listops", folder).test, made.config, made.device, lambda tested: None)
    assert found["test_accuracy"] == pytest.approx(float(together[:9].double().mean()))


def test_groups_are_the_root_operators(run, folder):
    found, _ = evaluated(run[0], "--data", folder)
    lines = (folder / "generated_test.tsv").read_text().splitlines()[1:]
    roots = [line.replace("(", "").split()[0] for line in lines]
    counts = {group["name"]: group["examples"] for group in found["kinds"]["groups"]}
    assert counts == {name: roots.count(f"[{name}") for name in counts}
    rule = sum(group["examples"] * group["rules"]["root operator"] for group in found["kinds"]["groups"])
    (root,) = (each["accuracy"] for each in found["baselines"] if each["rule"] == "root operator")
    assert rule / found["test_examples"] == pytest.approx(root)


def test_other_data_are_tested_and_another_split_of_the_same_is_not(run, tmp_path):
    made, _ = run
    other = generate(Settings(10, 60, 8, 4, 40, seed=1), tmp_path, workers=1)
    found, _ = evaluated(made, "--data", other)
    assert found["test_examples"] == 40 and found["data"]["origin"] != found["trained_on"][0]["origin"]
    smaller = generate(Settings(10, 60, 32, 8, 24), tmp_path, workers=1)
    result = call(made.folder, "--data", smaller)
    assert result.exit_code == 2 and "was trained on another split of the same examples" in result.output


def test_what_does_not_classify_is_refused(folder, tmp_path):
    Run(replace(TINY, objective="denoise", steps=1), load("listops", folder), tmp_path).train()
    result = call(tmp_path, "--data", folder)
    assert result.exit_code == 2 and "must hold a model that classifies; it was trained with objective=denoise" in (
        result.output.replace("\n", " ")
    )
    result = call(tmp_path / "nothing", "--data", folder)
    assert result.exit_code == 2 and "Error" in result.output


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return generate_images(Images(lra(32, 14), 60), tmp_path_factory.mktemp("images"), workers=1)


def test_paths_are_told_by_the_distance_of_their_markers(images, tmp_path):
    made = Run(CONFIG, load("pathfinder32", images), tmp_path / "run")
    metrics = made.train()
    found, output = evaluated(made, "--data", images)
    assert found["test_accuracy"] == pytest.approx(metrics["test_accuracy"]) and found["token_labels"]
    check_groups(found)
    assert "by marker distance" in output and "distance and end dashes" in output
    kinds = load("pathfinder32", images).kinds()
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(42)).numpy()[54:]
    distances = marker_distances(load_vectors(images))[rows]
    assert np.array_equal(np.argsort(kinds.of_test[np.argsort(distances)], kind="stable"), np.arange(6))


def test_a_run_on_hard_paths_is_tested_on_easy_ones(images, tmp_path):
    made = Run(replace(CONFIG, auxiliary=0.0), load("pathfinder32", images), tmp_path / "run")
    made.train()
    easy = generate_images(Images(lra(32, 6), 100), tmp_path, workers=1)
    result = call(made.folder, "--data", easy)
    assert result.exit_code == 2 and "needs images of 32 pixels with paths of 14 dashes" in result.output
    found, _ = evaluated(made, "--data", easy, "--difficulty", "easy")
    assert found["test_examples"] == 10
    check_groups(found)
