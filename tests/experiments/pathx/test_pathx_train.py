"""Runs: stages, logs, checkpoints, and that a paused and resumed run gives the same bits."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_lra_train import TicksOnRehearsal
from typer.testing import CliRunner

from experiments.lra import checkpoint
from experiments.lra.runlog import read
from experiments.pathfinder.cnn import results
from experiments.pathfinder.vectors import load as load_vectors
from experiments.pathx import evaluate, probe, step, table, testset, train, weights
from experiments.pathx import stream as streams
from experiments.pathx.analyse import analyse
from experiments.pathx.cli import app
from experiments.pathx.config import Config, Stage, as_dict, curriculum_from, from_dict, resumed, stretched
from experiments.pathx.curricula import CURRICULA, curriculum
from experiments.pathx.profiling import costs_of
from experiments.pathx.sources import training_seed
from experiments.pathx.step import training_step
from experiments.pathx.stream import Stream, make
from experiments.pathx.train import Run, saved_run

ROOT = Path(__file__).resolve().parents[3]
STAGES = (
    Stage(size=32, contour=6, tokens=1088, lr=3e-3, steps=7, warmup=2),
    Stage(size=32, contour=9, tokens=2048, lr=2e-3, steps=4, schedule="cosine", layers="near:8,dense"),
)
TINY = Config(
    curriculum=STAGES, layers="near:6,rows:2", block=32, width=16, heads=2, mlp=16, dropout=0.1, average=0.9,
    auxiliary=0.5, precision="fp32", device="cpu", log_every=2, validate_every=4, validation_images=4,
    checkpoint_every=3, checkpoint_minutes=1e6, registers=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def stream():
    with Stream(0) as stream:
        yield stream


@pytest.fixture(scope="module")
def whole(stream, tmp_path_factory):
    """A run from its first step to its end."""
    run = Run(TINY, tmp_path_factory.mktemp("whole") / "run", stream)
    said = run.train()
    return run, said


def tensors(run):
    own = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
    return own | {f"average.{name}": tensor for name, tensor in run.average.weights.items()}


def same_bits(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


TIMES = ("seconds", "startup_seconds", "tokens_per_s", "images_per_s", "waited")


def without_times(records):
    return [{key: value for key, value in each.items() if key not in TIMES} for each in records]


def test_a_run_goes_through_its_stages_and_counts(whole):
    run, said = whole
    records = read(run.folder / "log.jsonl")
    trained = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in trained] == [2, 3, 4, 6, 7, 8, 9, 11]
    assert [record["contour"] for record in trained] == [6] * 5 + [9] * 3
    assert [record["step"] for record in records if record["kind"] == "val"] == [4, 7, 8, 11]
    assert said["cost"]["steps"] == 11
    assert said["cost"]["images"] == trained[-1]["images"] > 11 * 2
    assert said["cost"]["minutes"] == pytest.approx(trained[-1]["seconds"] / 60)
    assert all(earlier["images"] < later["images"] for earlier, later in pairwise(trained))
    assert trained[-1]["lr"] < 0.2 * STAGES[1].lr  # cosine, at its end
    assert all(record["auxiliary"] > 0 for record in trained)
    assert run.progress() == 1.0
    assert saved_run(run.folder) == TINY


def test_a_paused_run_goes_on_to_the_same_bits(whole, stream, tmp_path):
    """Paused within a stage, at its end and within the next."""
    folder = tmp_path / "run"
    assert Run(TINY, folder, stream).train(pause=lambda step: step == 5) is None
    for stop in (7, 10):
        paused = Run(TINY, folder, stream, resume=True)
        assert paused.train(pause=lambda step, stop=stop: step == stop) is None
        assert paused.state.step == stop
    run = Run(TINY, folder, stream, resume=True)
    said = run.train()
    assert same_bits(tensors(run), tensors(whole[0]))
    assert {name: said["cost"][name] for name in ("steps", "images", "tokens")} == {
        name: whole[1]["cost"][name] for name in ("steps", "images", "tokens")
    }
    vals = [without_times(r for r in read(each.folder / "log.jsonl") if r["kind"] == "val") for each in (run, whole[0])]
    assert vals[0] == vals[1]


def options(folder):
    """TINY as the command line has it."""
    stages = folder / "stages.json"
    stages.write_text(json.dumps(as_dict(TINY)["curriculum"]))
    names = ("layers", "block", "width", "heads", "mlp", "dropout", "average", "auxiliary", "precision", "device",
             "log_every", "validate_every", "validation_images", "checkpoint_every", "checkpoint_minutes",
             "registers")  # fmt: skip
    return [f"--curriculum={stages}", *(f"--{name.replace('_', '-')}={getattr(TINY, name)}" for name in names)]


def test_sigterm_saves_and_stops(tmp_path, monkeypatch):
    steps = []

    def killed(*arguments):
        steps.append(1)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGTERM)
        return training_step(*arguments)

    monkeypatch.setattr(step, "training_step", killed)
    words = ["train", f"--out={tmp_path / 'run'}", "--workers=0", *options(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "Paused at step 2" in result.output
    assert (tmp_path / "run" / "checkpoint-00000002").is_dir()


def test_a_killed_run_goes_on_to_the_same_bits(whole, tmp_path):
    """By the command line, killed without a word after a checkpoint."""
    command = [sys.executable, "-m", "experiments.pathx", "train", f"--out={tmp_path / 'run'}", "--workers=0"]
    # As many as made `whole`: sums that are split among threads depend on their number.
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen([*command, *options(tmp_path)], cwd=ROOT, env=environment)
    deadline = time.monotonic() + 300
    while not list((tmp_path / "run").glob("checkpoint-*")):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "run" / "model.safetensors").exists()
    subprocess.run([*command, "--resume"], cwd=ROOT, env=environment, check=True)
    averaged = load_file(tmp_path / "run" / "model.safetensors")
    assert same_bits(averaged, load_file(whole[0].folder / "model.safetensors"))


def test_a_stage_ends_when_its_accuracy_is_reached(stream, tmp_path):
    easy = replace(STAGES[0], until=0.51, steps=40)
    config = replace(TINY, curriculum=(easy, STAGES[1]), advance_images=4, log_every=1, seed=5)
    run = Run(config, tmp_path / "run", stream)
    run.train()
    first = [record for record in run.log.of_kind("train") if record["stage"] == 0]
    assert len(first) < 40
    assert first[-1]["accuracy"] > 0.5
    assert len(run.log.of_kind("train")) == len(first) + 4


def test_an_accuracy_is_judged_at_the_same_steps_wherever_a_run_pauses(stream, tmp_path):
    easy = replace(STAGES[0], until=0.55, steps=30)
    config = replace(TINY, curriculum=(easy,), advance_images=6, log_every=4)
    at_once = Run(config, tmp_path / "at-once", stream)
    at_once.train()
    for stop in (1, 2, 3, 5):
        Run(config, tmp_path / "often", stream, resume=stop > 1).train(pause=lambda step, stop=stop: step == stop)
    often = Run(config, tmp_path / "often", stream, resume=True)
    often.train()
    assert often.state.step == at_once.state.step
    assert often.state.recent == at_once.state.recent
    assert same_bits(tensors(often), tensors(at_once))


def test_minutes_end_a_stage(stream, tmp_path):
    config = replace(TINY, curriculum=(replace(STAGES[0], steps=None, minutes=1e-4),), validate_every=1)
    run = Run(config, tmp_path / "run", stream)
    said = run.train()
    assert said["cost"]["steps"] == 1
    assert len(run.log.of_kind("val")) == 1  # not again at the stage's end


def test_starting_up_takes_none_of_a_stages_minutes(stream, tmp_path, monkeypatch):
    TicksOnRehearsal(monkeypatch, step, "rehearsal")
    timed = [replace(stage, steps=None, minutes=2.5 / 60) for stage in STAGES]
    config = replace(TINY, curriculum=tuple(timed), validate_every=100)
    assert Run(config, tmp_path, stream).train(pause=lambda step: step in (2, 3)) is None  # within a stage
    assert Run(config, tmp_path, stream, resume=True).train(pause=lambda step: step == 3) is None  # at its end
    run = Run(config, tmp_path, stream, resume=True)
    cost = run.train()["cost"]
    assert (cost["steps"], cost["minutes"], cost["startup_minutes"]) == (6, 6 / 60, 3000 / 60)
    assert [each["startup_seconds"] for each in run.log.of_kind("train")] == [1000, 2000, 3000, 3000]


def test_starting_up_changes_no_bit(whole, stream, tmp_path, monkeypatch):
    monkeypatch.setattr(step, "rehearsal", lambda *_: None)
    run = Run(TINY, tmp_path, stream)
    run.train()
    assert same_bits(tensors(run), tensors(whole[0]))


def test_a_run_is_saved_by_time_and_at_every_stages_end(stream, tmp_path, monkeypatch):
    TicksOnRehearsal(monkeypatch, step, "rehearsal")
    saved = []

    def save(folder, progress, *rest):
        saved.append((progress.step, progress.details["stage"]))
        return checkpoint.save(folder, progress, *rest)

    monkeypatch.setattr(train, "checkpoint", SimpleNamespace(**vars(checkpoint) | {"save": save}))
    config = replace(TINY, checkpoint_every=100, checkpoint_minutes=3 / 60)
    Run(config, tmp_path, stream).train()
    assert saved == [(1, 0), (4, 0), (7, 0), (7, 1), (8, 1), (11, 1), (11, 2)]  # a stage's start takes long, too


@pytest.mark.parametrize("every", [7, 100])
def test_a_run_killed_after_a_stage_goes_on_with_the_next(whole, stream, tmp_path, every):
    def die(step):
        if step == 8:  # the first stage has 7
            raise RuntimeError("killed")
        return False

    config = replace(TINY, checkpoint_every=every)
    with pytest.raises(RuntimeError, match="killed"):
        Run(config, tmp_path, stream).train(die)
    resumed = Run(config, tmp_path, stream, resume=True)
    assert (resumed.state.step, resumed.state.stage, resumed.state.stage_step) == (7, 1, 0)
    resumed.train()
    assert same_bits(tensors(resumed), tensors(whole[0]))


def test_checkpoint_files_are_small(whole):
    newest = sorted(whole[0].folder.glob("checkpoint-*"))
    assert len(newest) == 1
    assert all(part.stat().st_size <= 15 * 2**20 for part in newest[0].iterdir())


def test_the_headline_model_is_as_large_as_said():
    """1 to 1.5 million parameters: four copies, with the average and the optimiser, split over files of 15 MiB."""
    parameters = sum(each.numel() for each in weights.build(Config()).parameters())
    assert 0.5e6 < parameters < 1.5e6


def test_a_run_is_not_replaced_unasked(whole, stream):
    with pytest.raises(FileExistsError, match="--overwrite"):
        Run(TINY, whole[0].folder, stream)


def test_resuming_a_finished_run_changes_none_of_its_files(whole, stream, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(whole[0].folder, folder)
    said = json.loads((folder / "model.json").read_text()) | {"results": {"32-9-keep": {"accuracy": 0.5}}}
    (folder / "model.json").write_text(json.dumps(said))
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    monkeypatch.setattr(train, "device_name", lambda device: "another device")
    assert Run(TINY, folder, stream, resume=True).train() == said
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert Run(TINY, folder, stream, resume=True).train()["results"] == {}
    assert same_bits(load_file(folder / "model.safetensors"), load_file(whole[0].folder / "model.safetensors"))


def test_weights_alone_are_not_replaced_unasked(stream, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"of days")
    with pytest.raises(FileExistsError, match="--overwrite"):
        Run(TINY, tmp_path, stream)
    assert (tmp_path / "model.safetensors").read_bytes() == b"of days"


def test_a_run_needs_stages(stream, tmp_path):
    with pytest.raises(ValueError, match="at least one stage"):
        Run(replace(TINY, curriculum=()), tmp_path, stream)


def test_a_loss_that_is_no_number_stops_the_run(stream, tmp_path):
    config = replace(TINY, curriculum=(replace(STAGES[0], lr=1e30, warmup=0),), clip=0.0)
    with pytest.raises(FloatingPointError, match="lower the stage's lr"):
        Run(config, tmp_path / "run", stream).train()


def test_another_run_begins_with_a_runs_weights(whole, stream, tmp_path):
    path = whole[0].folder / "model.safetensors"
    config = replace(TINY, initial=str(path), auxiliary=0.0, curriculum=STAGES[:1])
    run = Run(config, tmp_path / "run", stream)
    assert same_bits(run.model.state_dict(), {k: v for k, v in load_file(path).items() if not k.startswith("tracer")})
    said = run.train()
    assert said["cost"]["images"] == run.state.images + whole[1]["cost"]["images"]
    assert said["cost"]["minutes"] > whole[1]["cost"]["minutes"]
    assert said["initial"]["sha256"] == whole[1]["sha256"]
    begun = Run(config, tmp_path / "paused", stream)
    assert begun.train(pause=lambda step: True) is None
    gone = str(tmp_path / "gone.safetensors")
    (tmp_path / "paused" / "config.json").write_text(
        (tmp_path / "paused" / "config.json").read_text().replace(str(path), gone)
    )
    resumed = Run(saved_run(tmp_path / "paused"), tmp_path / "paused", stream, resume=True)
    assert resumed.before == run.before  # a resumed run needs the weights that it began with no more
    with pytest.raises(ValueError, match="same layers, width and registers"):
        Run(replace(config, width=32), tmp_path / "other", stream)


def seen(monkeypatch, config, folder, stream, **more):
    """The seeds of the images that a run trains on, and the run."""
    seeds = []

    def making(recipe, step):
        seeds.append(recipe.seed)
        return make(recipe, step)

    monkeypatch.setattr(streams, "make", making)
    run = Run(config, folder, stream, **more)
    run.train()
    return set(seeds), run


def test_runs_that_follow_one_another_see_other_images(whole, stream, tmp_path, monkeypatch):
    short = replace(TINY, curriculum=(replace(STAGES[0], steps=2),))
    path = whole[0].folder / "model.safetensors"
    for earlier in (1, 2):
        config = replace(short, initial=str(path))
        seeds, run = seen(monkeypatch, config, tmp_path / str(earlier), stream)
        assert seeds == {training_seed(TINY.seed, earlier)}
        path = run.folder / "model.safetensors"
    # One that began before runs were counted goes on with the images that it began with.
    assert Run(config, tmp_path / "old", stream).train(pause=lambda step: step == 1) is None
    saved = json.loads((tmp_path / "old" / "config.json").read_text())
    assert saved["initial"].pop("runs") == 2
    (tmp_path / "old" / "config.json").write_text(json.dumps(saved))
    seeds, run = seen(monkeypatch, config, tmp_path / "old", stream, resume=True)
    assert seeds == {training_seed(TINY.seed)}
    # Weights that such a run has trained had two runs at least.
    config = replace(short, initial=str(run.folder / "model.safetensors"))
    assert Run(config, tmp_path / "new", stream).before["runs"] == 2


def test_weights_are_loaded_only_after_their_hash_is_checked(whole, tmp_path):
    path = whole[0].folder / "model.safetensors"
    model, config, about = weights.load(path)
    assert config == TINY
    assert about["cost"] == whole[1]["cost"]
    averaged = dict(whole[0].average.weights)
    assert all(torch.equal(tensor, averaged[name]) for name, tensor in model.state_dict().items() if name in averaged)
    damaged = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(FileNotFoundError, match="without its SHA-256"):
        weights.load(damaged)
    (tmp_path / "model.json").write_text(path.with_suffix(".json").read_text())
    with pytest.raises(ValueError, match="another file, or damaged"):
        weights.load(damaged)


def test_settings_survive_their_file():
    assert from_dict(json.loads(json.dumps(as_dict(TINY)))) == TINY


def test_a_resumed_run_keeps_what_determines_it():
    assert resumed(TINY, {"validate_every": 7}).validate_every == 7
    with pytest.raises(ValueError, match="--width was 16, got 32"):
        resumed(TINY, {"width": 32})


def test_curricula_fit_their_hour_and_end():
    for name, stages in CURRICULA.items():
        assert Config(curriculum=stages).curriculum == stages
        assert sum(stage.minutes or 0 for stage in stages) <= 60, name
    assert [CURRICULA[name][-1].name for name in ("pathx", "pathx-all", "path256", "path256-all")] == [
        "128/cl14+14+9+6", "128/cl14/all pixels", "256/cl14", "256/cl14/all pixels"]  # fmt: skip


def test_curricula_are_stretched_and_read_from_files(tmp_path):
    assert sum(stage.minutes for stage in stretched(CURRICULA["pathx"], 10)) == pytest.approx(10)
    with pytest.raises(ValueError, match="stages all have minutes"):
        stretched(STAGES, 10)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(as_dict(TINY)["curriculum"]))
    assert curriculum(str(path)) == STAGES
    path.write_text('[{"pixels": 32}]')
    with pytest.raises(ValueError, match="must be a list of stages"):
        curriculum_from(path)
    with pytest.raises(ValueError, match="must be one of smoke"):
        curriculum("path-x")
    with pytest.raises(FileNotFoundError, match="no curriculum"):
        curriculum(str(tmp_path / "none.json"))


@pytest.fixture(scope="module")
def tests(tmp_path_factory):
    """A small test set of 32 pixels and its folder."""
    folder = tmp_path_factory.mktemp("data")
    patch = pytest.MonkeyPatch()
    patch.setattr(testset, "IMAGES", 60)
    patch.setattr(testset, "HASHES", folder / "hashes.json")
    path = testset.test_set(32, 9, folder, workers=1, record=True, hashes=testset.HASHES)
    yield folder, path
    patch.undo()


def scored(whole, file, stream, images=30):
    model, config, _ = weights.load(whole[0].folder / "model.safetensors")
    stage = evaluate.stage_for(config, None, None)
    return evaluate.scores_on(model, config, stage, file, images, stream, torch.device("cpu")), stage, config


def test_a_test_result_is_that_of_the_images_in_their_order(whole, tests, stream):
    found, stage, config = scored(whole, tests[1], stream)
    assert found.labels.tolist() == load_vectors(tests[1]).labels[:30].tolist()
    said = evaluate.result(found, stage, config, tests[1], torch.device("cpu"))
    assert said["task"] == "LRA-parameter generated Pathfinder-32, contour length 9"
    assert said["layers"] == "near:8,dense"  # those of the stage
    assert said["images"] == 30
    assert "auxiliary" not in said  # what helped is told of the whole chain, beside it
    with Stream(1) as other:
        again, _, _ = scored(whole, tests[1], other)
    assert torch.equal(again.chances, found.chances)


def test_only_whole_results_are_stored_and_others_are_compared(whole, tests, stream, monkeypatch, tmp_path):
    path = whole[0].folder / "model.safetensors"
    found, stage, config = scored(whole, tests[1], stream)
    said = evaluate.result(found, stage, config, tests[1], torch.device("cpu"))
    with pytest.raises(ValueError, match="all 20000 images"):
        evaluate.store(path, stage, said)
    monkeypatch.setattr(evaluate, "IMAGES", 30)
    evaluate.store(path, stage, said)
    assert weights.beside(path)["results"]["32-9-drop"] == said
    name, note = table.found_below(whole[0].folder)[0]
    assert (name, note["sha256"]) == ("run", whole[1]["sha256"])
    assert evaluate.agrees(said | {"images": 500, "accuracy": 0.90}, {"accuracy": 0.93})
    assert not evaluate.agrees(said | {"images": 500, "accuracy": 0.86}, {"accuracy": 0.93})


def test_the_stage_of_a_test_is_the_last_of_its_size():
    config = Config(curriculum=CURRICULA["pathx-all"])
    assert evaluate.stage_for(config, None, None) == config.curriculum[-1]
    assert evaluate.stage_for(config, 64, 14).contour == 14
    assert evaluate.stage_for(config, 64, 14).background == "keep"
    assert evaluate.stage_for(config, 256, None).size == 256


def test_an_analysis_has_bins_rules_maps_and_masks(whole, tests, stream, tmp_path, monkeypatch):
    figure = {"rule": results.RULE, "images_of": "pathfinder32-cl9", "accuracy": 0.7, "error": 0.01, "images": 2000}
    monkeypatch.setattr(results, "STORED", tmp_path)
    results.write(figure | {"by_distance": {"accuracy": [0.6, 0.7, 0.7, 0.8]}}, tmp_path)
    model, config, _ = weights.load(whole[0].folder / "model.safetensors")
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


def test_the_table_has_ours_and_the_published(tmp_path):
    note = {
        "sha256": "0", "parameters": 900_000, "auxiliary": 0.5, "device": "X", "cost": {"images": 2e6, "minutes": 55.0},
        "results": {"128-14-drop": {"accuracy": 0.971, "error": 0.001}, "128-9-drop": {"accuracy": 0.5, "error": 0.1}},
    }  # fmt: skip
    (tmp_path / "one.json").write_text(json.dumps(note))
    without = table.rows([tmp_path], tmp_path)  # no weights, no network
    assert without == [table.HEAD, table.rule_row(), *table.PUBLISHED]
    (tmp_path / "one.safetensors").touch()
    lines = table.rows([tmp_path], tmp_path)
    name = "ours: one, background dropped, pixel labels (weight 0.5)"
    assert lines[1] == [name, "97.1 ± 0.1 %", "-", "0.90M", "2.00M", "55 min, X"]
    assert "LRA-parameter generated" in table.markdown(lines)
    page = tmp_path / "shortcuts.md"
    page.write_text("| images of | images | rule | accuracy |\n| --- | --- | --- | --- |\n" + "".join(
        f"| pathfinder{size}-cl14 | 9 | {rule} | {accuracy} ± 0.1 |\n"
        for size, rule, accuracy in ((128, "marker distance", 1), *((128 * n, table.NO_TRACING, n + 1) for n in (1, 2)))
    ))  # fmt: skip
    assert table.rule_row(page)[1:3] == ["2 ± 0.1 %", "3 ± 0.1 %"]
    assert all(len(line) == len(table.HEAD) for line in lines)


@pytest.mark.parametrize("background", ["drop", "keep"])
def test_a_probe_measures_steps(background):
    case = probe.Case(32, 6, "near:4,dense", background)
    config = Config(width=16, heads=2, mlp=16, precision="fp32", block=32)
    found = probe.measured(case, config, 2048, torch.device("cpu"), 0.01)
    assert found["tokens_per_s"] == pytest.approx(
        found["images_per_s"] * found["live"] * 2048 / found["images_a_step"], rel=0.3
    )
    assert 0 < found["tiles"] <= 1
    assert found["step_ms"] > 0 and found["masks_ms"] > 0
    if background == "keep":
        assert (found["live"], found["images_a_step"]) == (1, 2)


def test_the_costs_of_a_step_are_those_of_what_it_runs():
    x = torch.randn(300, 300)

    def step(number):
        for _ in range(number + 1):
            x @ x
        x.exp()

    found = costs_of(step, 3, torch.device("cpu"))
    calls = {cost.name: cost.calls for cost in found}
    assert calls["aten::mm"] == 2 and calls["aten::exp"] == 1  # 1, 2 and 3 products
    assert [cost.ms for cost in found] == sorted((cost.ms for cost in found), reverse=True)
    assert found[0].ms > 0


def test_a_probe_shows_what_its_steps_are_made_of():
    words = ["--sizes=32", "--contour=6", "--masks=dense", "--tokens=1024", "--block=32", "--precision=fp32"]
    words += ["--width=16", "--heads=2", "--mlp=16", "--seconds=0.01", "--device=cpu", "--profile=3"]
    result = CliRunner().invoke(app, ["probe", *words])
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"^ +[\d.]+ ms +[\d.]+ calls  \S", result.output, re.MULTILINE)) == 3


def test_names_of_kernels_are_shown_as_they_are(monkeypatch):
    name = "void at::fill<int [4]>(std::array<char*, 2>)::[lambda](float)"
    monkeypatch.setattr(probe, "measured", lambda *_, **__: {
        "size": 32, "layers": "dense", "step_ms": 1.0, "masks_ms": 1.0, "tokens_per_s": 1.0, "images_per_s": 1.0,
        "tiles": 1.0, "memory_gb": None, "device": "a device", "costs": [{"name": name, "ms": 1.0, "calls": 1.0}],
    })  # fmt: skip
    result = CliRunner().invoke(app, ["probe", "--sizes=32", "--masks=dense", "--device=cpu", "--profile=1"])
    assert result.exit_code == 0, result.output
    assert name in result.output


def test_a_probe_of_a_gpu_is_not_begun_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["probe"])
    assert result.exit_code == 1 and "there is no CUDA device" in result.output


def test_the_command_line_helps_and_says_what_is_wrong(tmp_path):
    runner = CliRunner()
    for command in ("train", "evaluate", "testset", "analyse", "table", "probe"):
        assert runner.invoke(app, [command, "--help"]).exit_code == 0
    for arguments, text in (
        (["train", "--resume"], "--resume needs --out"),
        (["train", "--resume", "--out", str(tmp_path), "--minutes", "3"], "leave out --curriculum"),
        (["train", "--curriculum", "nothing"], "must be one of smoke"),
        (["evaluate", str(tmp_path / "none")], "there is no file"),
    ):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 1
        assert text in result.output
