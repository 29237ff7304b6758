import json
import shutil
import signal
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from experiments.pathfinder.seeds import training_seed
from experiments.pathx import train, weights
from experiments.pathx.cli import app
from experiments.pathx.config import as_dict, from_dict
from experiments.pathx.data import stream as streams
from experiments.pathx.data.batches import make
from experiments.pathx.model.intensity import fitted
from experiments.pathx.train import Run, saved_run
from experiments.training import checkpoint, steps
from experiments.training.run_log import read
from experiments.training.steps import compute_gradients
from tests.experiments.lra.runs import same_bits
from tests.experiments.pathx.runs import STAGES, TINY, options, tensors
from tests.experiments.training.fake_clock import FakeClock
from tests.processes.forked import execute_in_threads, interpreting


@pytest.fixture(scope="module")
def whole(stream, tmp_path_factory):
    run = Run(TINY, tmp_path_factory.mktemp("whole") / "run", stream)
    return run, run.train()


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
    assert trained[-1]["lr"] < 0.2 * STAGES[1].lr
    assert all(record["auxiliary"] > 0 for record in trained)
    assert run.progress() == 1.0
    assert saved_run(run.folder) == TINY


def test_a_paused_run_goes_on_to_the_same_bits(whole, stream, tmp_path):
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


def test_sigterm_saves_and_stops(tmp_path, monkeypatch):
    taken = []

    def killed(*arguments):
        taken.append(1)
        if len(taken) == 2:
            signal.raise_signal(signal.SIGTERM)
        return compute_gradients(*arguments)

    monkeypatch.setattr(steps, "compute_gradients", killed)
    words = ["train", f"--out={tmp_path / 'run'}", "--workers=0", *options(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "Paused at step 2" in result.output
    assert (tmp_path / "run" / "checkpoint-00000002").is_dir()


def test_a_killed_run_goes_on_to_the_same_bits(whole, tmp_path):
    command = "-m", "experiments.pathx", "train", f"--out={tmp_path / 'run'}", "--workers=0"
    # Sums that are split among threads depend on their number.
    threads = torch.get_num_threads()
    process = interpreting().start(execute_in_threads, (threads, *command, *options(tmp_path)))
    deadline = time.monotonic() + 300
    while not list((tmp_path / "run").glob("checkpoint-*")):
        assert process.is_alive(), "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join()
    assert not (tmp_path / "run" / "model.safetensors").exists()
    process = interpreting().start(execute_in_threads, (threads, *command, "--resume"))
    process.join()
    assert process.exitcode == 0
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
    assert len(run.log.of_kind("val")) == 1


def test_starting_up_takes_none_of_a_stages_minutes(stream, tmp_path, monkeypatch):
    FakeClock(monkeypatch)
    timed = [replace(stage, steps=None, minutes=2.5 / 60) for stage in STAGES]
    config = replace(TINY, curriculum=tuple(timed), validate_every=100)
    assert Run(config, tmp_path, stream).train(pause=lambda step: step in (2, 3)) is None
    assert Run(config, tmp_path, stream, resume=True).train(pause=lambda step: step == 3) is None
    run = Run(config, tmp_path, stream, resume=True)
    cost = run.train()["cost"]
    assert (cost["steps"], cost["minutes"], cost["startup_minutes"]) == (6, 6 / 60, 3000 / 60)
    assert [each["startup_seconds"] for each in run.log.of_kind("train")] == [1000, 2000, 3000, 3000]


def test_starting_up_changes_no_bit(whole, stream, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "dry_run", lambda *_: None)
    run = Run(TINY, tmp_path, stream)
    run.train()
    assert same_bits(tensors(run), tensors(whole[0]))


def test_a_run_is_saved_by_time_and_at_every_stages_end(stream, tmp_path, monkeypatch):
    FakeClock(monkeypatch)
    saved, write = [], checkpoint.save

    def save(folder, progress, *rest, **options):
        saved.append((progress.step, progress.details["stage"]))
        return write(folder, progress, *rest, **options)

    monkeypatch.setattr(checkpoint, "save", save)
    config = replace(TINY, checkpoint_every=100, checkpoint_minutes=3 / 60)
    Run(config, tmp_path, stream).train()
    assert saved == [(1, 0), (4, 0), (7, 0), (7, 1), (8, 1), (11, 1), (11, 2)]


@pytest.mark.parametrize("every", [7, 100])
def test_a_run_killed_after_a_stage_goes_on_with_the_next(whole, stream, tmp_path, every):
    def die(step):
        if step == 8:
            raise RuntimeError("killed")
        return False

    config = replace(TINY, checkpoint_every=every)
    with pytest.raises(RuntimeError, match="killed"):
        Run(config, tmp_path, stream).train(die)
    resumed = Run(config, tmp_path, stream, resume=True)
    assert (resumed.state.step, resumed.state.stage, resumed.state.stage_step) == (7, 1, 0)
    resumed.train()
    assert same_bits(tensors(resumed), tensors(whole[0]))


def test_a_run_is_not_replaced_unasked(whole, stream):
    with pytest.raises(FileExistsError, match="--overwrite"):
        Run(TINY, whole[0].folder, stream)


def test_a_run_does_not_replace_the_one_whose_weights_it_begins_with(whole, stream):
    path = whole[0].folder / "model.safetensors"
    with pytest.raises(ValueError, match=r"--initial .* lies in .*, which --overwrite deletes: move it away"):
        Run(replace(TINY, initial=str(path)), whole[0].folder, stream, overwrite=True)
    assert path.exists() and path.with_suffix(".json").exists()


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
    with pytest.raises(ValueError, match="same layers, width, intensity and registers"):
        Run(replace(config, width=32), tmp_path / "other", stream)


def seen(monkeypatch, config, folder, stream, **more):
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
    assert Run(config, tmp_path / "old", stream).train(pause=lambda step: step == 1) is None
    saved = json.loads((tmp_path / "old" / "config.json").read_text())
    assert saved["initial"].pop("runs") == 2
    (tmp_path / "old" / "config.json").write_text(json.dumps(saved))
    seeds, run = seen(monkeypatch, config, tmp_path / "old", stream, resume=True)
    assert seeds == {training_seed(TINY.seed)}
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


def test_a_model_with_a_row_for_each_level_goes_on_with_smooth_features(stream, tmp_path):
    old = replace(TINY, intensity="rows", renderings=False, floor=1, curriculum=STAGES[:1])
    Run(old, tmp_path / "old", stream).train()
    path = tmp_path / "old" / "model.safetensors"
    run = Run(replace(TINY, initial=str(path), curriculum=STAGES[:1]), tmp_path / "new", stream)
    before = load_file(path)
    rows = fitted(before["embedding.weight"])
    assert same_bits({name: getattr(run.model.embedding, name) for name in rows}, rows)
    assert same_bits({"norm": run.model.norm.weight}, {"norm": before["norm.weight"]})
    assert run.train() is not None
    with pytest.raises(ValueError, match="same layers, width, intensity and registers"):
        Run(replace(old, initial=str(tmp_path / "new" / "model.safetensors")), tmp_path / "back", stream)


def test_settings_of_a_run_from_before_renderings_say_that_it_had_none():
    values = as_dict(TINY)
    for name in ("intensity", "renderings", "floor"):
        del values[name]
    config = from_dict(values)
    assert (config.intensity, config.renderings, config.floor) == ("rows", False, 1)


def test_the_second_head_goes_on_where_it_names_the_same_classes(whole, stream, tmp_path):
    path = str(whole[0].folder / "model.safetensors")
    before = load_file(path)
    run = Run(replace(TINY, initial=path), tmp_path / "labels", stream)
    assert same_bits(run.model.state_dict(), before)
    other = Run(replace(TINY, initial=path, hidden=0.2), tmp_path / "hidden", stream)
    assert other.model.state_dict()["tracer.weight"].shape != before["tracer.weight"].shape


def test_positions_in_a_line_are_places_in_rows_and_do_not_go_on_from_others(whole, stream, tmp_path):
    line = replace(TINY, positions="line", curriculum=STAGES[:1])
    run = Run(line, tmp_path / "line", stream)
    assert run.model.rates.shape == (line.width // line.heads // 2,)
    assert run.train() is not None
    with pytest.raises(ValueError, match="positions line; got plane"):
        Run(replace(line, initial=str(whole[0].folder / "model.safetensors")), tmp_path / "other", stream)
