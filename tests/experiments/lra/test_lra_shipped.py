"""The weights that the repository ships, and the figures that they name."""

import json

import pytest
from typer.testing import CliRunner

from experiments.lra import cli
from experiments.lra.data.listops.generator import Settings, generate
from experiments.lra.shipped import FOLDER, shipped
from experiments.lra.table.rows import DENSE, NAMES, runs_of
from experiments.measurements import read
from experiments.pathfinder.generate import Settings as Images
from experiments.pathfinder.generate import generate as generate_images
from experiments.pathfinder.parameters import lra

RESULTS = FOLDER.parent / "results"
MODELS = {each.task: each for each in shipped()}
MOST_BYTES, LARGEST = 18 * 2**20, 4 * 10**6


def call(*words):
    return CliRunner().invoke(cli.app, ["test", *map(str, words), "--device", "cpu"], env={"COLUMNS": "300"})


def test_the_weights_are_small_and_nothing_else_lies_beside_them():
    files = [path for path in FOLDER.rglob("*") if path.is_file() and path.parent.name != "tests"]
    assert {path.name for path in files} == {"README.md", "model.safetensors", "model.json"}
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    assert [path for path in files if path.stat().st_size > LARGEST] == []


def test_a_model_names_its_stored_figure_and_the_tables_name_its_folder():
    stored = {each.name: each for path in (RESULTS / "lra").glob("*.jsonl") for each in measured(path)}
    table, page = (path.read_text() for path in (RESULTS / "lra" / "table.md", FOLDER / "README.md"))
    assert MODELS.keys() == {"listops", "text", "image", "pathfinder32"}
    for each in MODELS.values():
        assert each.folder.name == each.task
        assert each.accuracy in map(pytest.approx, runs_of(stored[each.figure]))  # the seed that is shipped
        setting, way = each.figure.split("/")[3:]
        mask = str(stored[each.figure].settings.get("mask", way)).replace("|", "\\|")
        of_run, of_test = (line for line in table.splitlines() if f"(../../weights/{each.task})" in line)
        assert f"| {setting} | {mask} |" in of_run
        assert f"| {setting} | {each.accuracy:.1f} |" in of_test
        assert f"({each.task})" in page and each.figure in page


def measured(path):
    return read(path)[1] if path.read_text().startswith('{"run":') else []


def test_a_model_is_of_the_best_sparse_row_of_its_task():
    lines = (RESULTS / "lra" / "table.md").read_text().splitlines()
    for task in MODELS:
        _, *of_task = (line for line in lines if line.startswith(f"| {NAMES.get(task, task)} |"))  # of all tasks, first
        sparse = [line for line in of_task if line.split(" | ")[2] not in DENSE]
        assert f"(../../weights/{task})" in sparse[0]


def test_the_command_lists_every_model():
    result = CliRunner().invoke(cli.app, ["models"], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    for each in MODELS.values():
        assert f"{each.accuracy:.2f} %: {each.figure}" in result.output
        assert f"    {each.command}\n" in result.output


def test_whoever_has_no_data_is_told_where_they_are():
    said = {
        "text": "ai.stanford.edu/~amaas/data/sentiment",
        "image": "www.cs.toronto.edu/~kriz/cifar.html",
        "pathfinder32": "`python -m experiments.pathfinder generate --size 32 --contour 14`",
    }
    for task, place in said.items():
        result = call(MODELS[task].folder)
        assert result.exit_code == 2
        assert f"the task {task} needs --data, the folder of its files: " in result.output and place in result.output


def test_the_mask_that_runs_code_is_named_as_a_shell_takes_it():
    model = MODELS["listops"]
    result = call(model.folder)
    assert result.exit_code == 2 and f"pass{model.command[model.command.index(' --mask ') :]}" in result.output


def expressions(place):
    return generate(Settings(500, 1000, train=8, val=8, test=24, seed=5), place, workers=1)


def images(place):
    return generate_images(Images(lra(32, 14), 240, seed=77), place, workers=1)


@pytest.mark.parametrize(("task", "made", "least"), [("listops", expressions, 13), ("pathfinder32", images, 20)])
def test_a_shipped_model_answers_examples_that_no_run_has_seen_and_the_test_is_stored(tmp_path, task, made, least):
    """Of 24. The root operator alone answers 9 expressions, and guessing half of the images."""
    model, record = MODELS[task], tmp_path / "again.jsonl"
    words = ["--data", made(tmp_path / "data"), "--mask", model.mask, "--out", tmp_path / "a.json", "--record", record]
    result = call(model.folder, *words)
    assert result.exit_code == 0, result.output
    assert f"Its stored figure: {model.figure}" in result.output
    found, (again,) = json.loads((tmp_path / "a.json").read_text()), read(record)[1]
    assert found["test_examples"] == 24 and 24 * found["test_accuracy"] >= least
    assert again.name == model.figure.replace("/accuracy/", "/tested-again/")
    assert again.value == pytest.approx(100 * found["test_accuracy"])
    assert again.value * again.spread == pytest.approx(100 * found["error"])
    assert again.settings["accuracy_of_run"] == pytest.approx(model.accuracy)
    assert (again.settings["examples"], again.settings["of"]) == (24, 24)
