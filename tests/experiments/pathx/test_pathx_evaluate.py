import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from experiments.measurements import read
from experiments.pathfinder import testset
from experiments.pathfinder.cnn import results
from experiments.pathfinder.parameters import parameters_of
from experiments.pathfinder.vectors import load as load_vectors
from experiments.pathx import cli, evaluate, rendering_table, table, weights
from experiments.pathx.analyse import analyse
from experiments.pathx.config import Config
from experiments.pathx.curricula import CURRICULA
from experiments.pathx.data.stream import Stream
from experiments.pathx.train import Run
from tests.experiments.pathx.runs import TINY, UNET


@pytest.fixture(scope="module")
def finished(stream, tmp_path_factory):
    run = Run(TINY, tmp_path_factory.mktemp("whole") / "run", stream)
    note = run.train()
    return run.folder / "model.safetensors", note


@pytest.fixture(scope="module")
def tests(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    patch = pytest.MonkeyPatch()
    patch.setattr(testset, "IMAGES", 60)
    patch.setattr(testset, "HASHES", folder / "hashes.json")
    path = testset.test_set(32, 9, folder, workers=1, record=True, hashes=testset.HASHES)
    yield folder, path
    patch.undo()


def scored(finished, file, stream, images=30):
    model, config, _ = weights.load(finished[0])
    stage = evaluate.stage_for(config, None, None)
    done = []
    evaluation = evaluate.Evaluation(model, config, stage, stream, torch.device("cpu"))
    found = evaluation.scores(evaluate.pack_from_file, file, images=images, progress=done.append)
    assert done == sorted(done) and done[-1] == images
    return found, evaluation


def test_a_test_result_is_that_of_the_images_in_their_order(finished, tests, stream):
    found, evaluation = scored(finished, tests[1], stream)
    assert found.labels.tolist() == load_vectors(tests[1]).labels[:30].tolist()
    said = evaluation.result(found, tests[1])
    assert said["task"] == "LRA-parameter generated Pathfinder-32, contour length 9"
    assert said["layers"] == "near:8,dense"
    assert said["images"] == 30
    assert "auxiliary" not in said
    with Stream(1) as other:
        again, _ = scored(finished, tests[1], other)
    assert torch.equal(again.chances, found.chances)


def test_only_whole_results_are_stored_and_others_are_compared(finished, tests, stream, monkeypatch, tmp_path):
    path = finished[0]
    found, evaluation = scored(finished, tests[1], stream)
    said = evaluation.result(found, tests[1])
    with pytest.raises(ValueError, match="all 20000 images"):
        evaluate.store(path, evaluation.stage, said)
    monkeypatch.setattr(evaluate, "IMAGES", 30)
    evaluate.store(path, evaluation.stage, said)
    assert weights.beside(path)["results"]["32-9-drop"] == said
    name, note = table.found_below(finished[0].parent)[0]
    assert (name, note["sha256"]) == ("run", finished[1]["sha256"])
    assert weights.file_in(path.parent) == weights.file_in(path) == path
    assert evaluate.agrees(said | {"images": 500, "accuracy": 0.90}, {"accuracy": 0.93})
    assert not evaluate.agrees(said | {"images": 500, "accuracy": 0.86}, {"accuracy": 0.93})


def test_a_result_becomes_measurements(finished, tests, stream):
    found, evaluation = scored(finished, tests[1], stream)
    said = evaluation.result(found, tests[1])
    about = {"helped": {"labels": 0.0, "hidden": 0.0}}
    cost = weights.beside(finished[0])["cost"]
    named = evaluate.trained_as(evaluation.stage, evaluation.config, about)
    accuracy, minutes, images = evaluate.measurements_of(said, cost, named)
    assert accuracy.name.startswith("pathx/32-pixels-9/accuracy/labels-alone")
    assert accuracy.value == pytest.approx(100 * said["accuracy"]) and accuracy.settings["images"] == said["images"]
    assert (minutes.value, images.value) == (cost["minutes"], cost["images"] / 1e6)
    whole = replace(evaluation.stage, size=128, contour=14)
    config = replace(evaluation.config, renderings=True)
    named = evaluate.trained_as(whole, config, {"helped": {"labels": 0.5, "hidden": 0.0}})
    assert named[:2] == ("path-x", "pixel-labels")
    rows = {"rows": [{"rendering": "brightness 0.85", "images": 40, "accuracy": 0.9, "error": 0.05}]}
    (one,) = rendering_table.measurements_of(rows, named)
    assert one.name == f"pathx/renderings/brightness-0.85/path-x-pixel-labels-{named[2]}" and one.value == 90.0


def test_the_command_adds_a_seed_to_a_record(finished, tests, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "made_test_set", lambda *_: tests[1])
    record = tmp_path / "cpu.jsonl"
    words = ["evaluate", str(finished[0]), "--images=30", "--device=cpu", "--workers=0", f"--record={record}"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code in (0, 1), done.output
    run, (accuracy, *_) = read(record)
    assert accuracy.settings["run_seeds"] == [run.seed] and f"{accuracy.value:.1f} %" in done.output
    assert "--record" not in run.command and run.command.startswith("python -m experiments.pathx")
    again = CliRunner().invoke(cli.app, words)
    assert again.exit_code == 2 and "each seed must be added once" in " ".join(again.output.split())


def test_the_stage_of_a_test_is_the_last_of_its_size():
    config = Config(curriculum=CURRICULA["pathx-all"])
    assert evaluate.stage_for(config, None, None) == config.curriculum[-1]
    assert evaluate.stage_for(config, 64, 14).contour == 14
    assert evaluate.stage_for(config, 64, 14).background == "keep"
    assert evaluate.stage_for(config, 256, None).size == 256


def test_an_analysis_has_bins_rules_maps_and_masks(finished, tests, stream, tmp_path, monkeypatch):
    figure = {"rule": "small 2-D CNN", "images_of": "pathfinder32-cl9", "accuracy": 0.7, "error": 0.01, "images": 2000}
    monkeypatch.setattr(results, "STORED", tmp_path)
    figure |= {"by_distance": {"accuracy": [0.6, 0.7, 0.7, 0.8]}}
    (tmp_path / "cnn-pathfinder32-cl9.json").write_text(json.dumps(figure))
    model, config, _ = weights.load(finished[0])
    stage = evaluate.stage_for(config, None, None)
    found = analyse(model, config, [stage], lambda _: tests[1], 60, 2, tmp_path, stream, torch.device("cpu"))
    fold = found["folds"][0]
    assert sum(fold["by_distance"]["images"]) == 60
    mean = sum(
        count * (part or 0) for count, part in zip(fold["by_distance"]["images"], fold["by_distance"]["accuracy"])
    )
    assert mean / 60 == pytest.approx(fold["accuracy"])
    assert [rule["rule"] for rule in fold["by_distance"]["rules"]] == ["marker distance", "distance and end dashes"]
    assert [each["mask"] for each in found["masks"]] == ["near:8", "dense"]
    assert found["masks"][0]["density"] < found["masks"][1]["density"] == 1
    assert found["masks"][1]["reached"] == 1
    assert 1 <= len(list(tmp_path.glob("attention-32-9-*.png"))) <= 2
    text = (tmp_path / "analysis.md").read_text()
    assert "no tracing: marker distance" in text
    assert "| small 2-D CNN | | 70.0 % ± 1.0 | 60.0 %, 70.0 %, 70.0 %, 80.0 % | |" in text
    assert "near:8" in text


def test_a_model_is_tested_on_other_strokes(finished):
    file, _ = finished
    result = CliRunner().invoke(
        cli.app, ["evaluate", str(file), "--strokes", "third", "--size", "32", "--contour", "3", "--images", "12",
                  "--device", "cpu", "--workers", "0", "--out", str(file.parent / "third.json")]
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads((file.parent / "third.json").read_text())
    assert found["task"] == "third strokes, 32 pixels, 3 dashes"
    assert (found["images"], found["test_set_sha256"], found["strokes"]) == (12, None, "original")
    result = CliRunner().invoke(cli.app, ["evaluate", str(file), "--strokes", "third", "--store"])
    assert result.exit_code == 2
    assert "--strokes draws images of its own: leave out --store and --release" in " ".join(result.output.split())


def test_results_say_which_images_a_model_was_trained_on():
    fixed = [replace(stage, images=160_000) for stage in UNET.curriculum]
    assert evaluate.training_images(UNET) == "fresh"
    assert evaluate.training_images(replace(UNET, curriculum=tuple(fixed))) == f"{160_000 * len(fixed):,} drawings"
    last = (*UNET.curriculum[:-1], fixed[-1])
    assert evaluate.training_images(replace(UNET, curriculum=last)) == "fresh, then 160,000 drawings"
    assert evaluate.training_images(replace(UNET, release="lra")) == "a release's"


def test_a_unet_has_results_and_a_row_and_no_maps(tests, stream, monkeypatch, tmp_path):
    run = Run(replace(UNET, curriculum=UNET.curriculum[1:]), tmp_path / "run", stream)
    run.train()
    path = run.folder / "model.safetensors"
    found, evaluation = scored((path,), tests[1], stream)
    said = evaluation.result(found, tests[1])
    assert (said["model"], said["layers"], said["positions"]) == ("unet", None, None)
    monkeypatch.setattr(evaluate, "IMAGES", 30)
    evaluate.store(path, evaluation.stage, said)
    note = weights.beside(path)
    row = table.row_of("u", note, "drop", {"128": note["results"]["32-9-drop"]})
    assert row[4:10] == ["class", "levels below 32 black", "-", "-", "U-Net, convolutions", "fresh, drawn renderings"]
    rendered = rendering_table.table(evaluation, tests[1], 4, names=list(rendering_table.RENDERINGS)[:2])
    assert [each["images"] for each in rendered["rows"]] == [4, 4]
    model, config, _ = weights.load(path)
    given = model, config, [evaluation.stage], lambda _: tests[1], 40
    with pytest.raises(ValueError, match="a U-Net has no attention maps; pass --examples 0"):
        analyse(*given, 2, tmp_path, stream, torch.device("cpu"))
    assert analyse(*given, 0, tmp_path, stream, torch.device("cpu"))["masks"] == []
    text = (tmp_path / "analysis.md").read_text()
    assert "no tracing: marker distance" in text and "Masks" not in text


def test_the_table_has_ours_and_the_published(tmp_path):
    note = {
        "sha256": "0", "parameters": 900_000, "auxiliary": 0.5, "device": "X", "cost": {"images": 2e6, "minutes": 55.0},
        "results": {
            "128-14-drop": {"accuracy": 0.971, "error": 0.001, "layers": "tiles:16*5,dense*4"},
            "128-9-drop": {"accuracy": 0.5, "error": 0.1},
        },
    }  # fmt: skip
    (tmp_path / "stages.json").write_text("[]")
    (tmp_path / "one.json").write_text(json.dumps(note | {"results": {}}))
    without = table.rows([tmp_path])
    assert without == [table.HEAD, table.rule_row(), *table.PUBLISHED]
    (tmp_path / "one.json").write_text(json.dumps(note))
    lines = table.rows([tmp_path])
    assert lines[1] == [
        "ours: one", "97.1 ± 0.1 %", "-", "-", "class, pixel labels (weight 0.5)", "black left out", "2-D rotary",
        "Hilbert", "tiles:16*5,dense*4", "fresh, one rendering", "0.90M", "2.00M", "55 min, X",
    ]  # fmt: skip
    other = {"accuracy": 0.9, "error": 0.002, "layers": "tiles:16@rows*9", "floor": 32, "positions": "line"}
    other |= {"renderings": "drawn", "training_images": "1,000 of each length"}
    (tmp_path / "two.json").write_text(json.dumps(note | {"auxiliary": 0.0, "results": {"256-14-drop": other}}))
    lines = table.rows([tmp_path])
    assert [line[0] for line in lines[1:3]] == ["ours: two", "ours: one"]
    assert lines[1][2:10] == ["90.0 ± 0.2 %", "-", "class", "levels below 32 left out", "1-D rotary", "rows",
                             "tiles:16@rows*9", "1,000 of each length, drawn renderings"]  # fmt: skip
    assert "LRA-parameter generated" in table.markdown(lines)
    page = tmp_path / "shortcuts.md"
    names = [parameters_of(size, 14).name for size in table.SIZES]
    page.write_text("| images of | images | rule | accuracy |\n| --- | --- | --- | --- |\n" + "".join(
        f"| {name} | 9 | {rule} | {accuracy} ± 0.1 |\n"
        for number, name in enumerate(names)
        for rule, accuracy in (("marker distance", 1), (table.NO_TRACING, number + 2))
    ))  # fmt: skip
    assert table.rule_row([page])[1:4] == ["2 ± 0.1 %", "3 ± 0.1 %", "4 ± 0.1 %"]
    assert all(len(line) == len(table.HEAD) for line in lines)
