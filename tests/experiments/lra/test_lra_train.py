import json
import random
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from experiments.lra import train
from experiments.lra.config import configure, resumed
from experiments.lra.data.listops.generator import generate
from experiments.lra.losses import objective_of
from experiments.lra.presets import PRESETS
from experiments.lra.tasks import load
from experiments.lra.train import Run, saved_run
from experiments.training import checkpoint, steps
from experiments.training.run_log import read
from tests.experiments.lra.runs import DATA, TINY, same_bits, weights
from tests.experiments.training.fake_clock import FakeClock
from tests.processes.forked import interpreting
from tests.processes.threads import threads


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return load("listops", generate(DATA, tmp_path_factory.mktemp("data"), workers=1))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    run = Run(TINY, data, tmp_path_factory.mktemp("whole") / "run")
    metrics = run.train()
    return run, metrics, weights(run)


TIMES = ("seconds", "startup_seconds", "tokens_per_s")


def without_times(records):
    return [{key: value for key, value in each.items() if key not in TIMES} for each in records]


def test_a_run_leaves_its_log_metrics_and_newest_checkpoint(data, whole):
    run, metrics, _ = whole
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "checkpoint-00000011", "config.json", "log.jsonl", "metrics.json", "model.safetensors",
    ]  # fmt: skip
    records = read(run.folder / "log.jsonl")
    assert [record["step"] for record in records if record["kind"] == "train"] == [2, 3, 4, 6, 8, 9, 10, 11]
    assert [record["step"] for record in records if record["kind"] == "val"] == [4, 8]
    assert [record["step"] for record in records if record["kind"] == "test"] == [11]
    assert json.loads((run.folder / "metrics.json").read_text()) == metrics
    assert saved_run(run.folder) == (TINY, data.folder)


def test_metrics_hold_what_a_result_needs(whole):
    run, metrics, _ = whole
    assert metrics["generated_data"] is True
    assert metrics["test_examples"] == 24
    assert [baseline["rule"] for baseline in metrics["baselines"]] == ["majority class", "root operator"]
    assert metrics["density"] == run.mask.density < 1
    assert metrics["length"] == 48
    assert metrics["steps"] == 11
    assert metrics["parameters"] == sum(parameter.numel() for parameter in run.model.parameters())
    assert metrics["versions"]["torch"] == torch.__version__
    assert "CPU" in metrics["device"]


@pytest.mark.parametrize("stop", [1, 3, 7, 10])
def test_a_paused_and_resumed_run_gives_the_same_bits(data, whole, tmp_path, stop):
    first = Run(TINY, data, tmp_path)
    assert first.train(pause=lambda step: step == stop) is None
    torch.manual_seed(99)
    second = Run(TINY, data, tmp_path, resume=True)
    assert second.state.step == stop
    metrics = second.train()
    run, expected, bits = whole
    assert same_bits(weights(second), bits)
    assert metrics["test_loss"] == expected["test_loss"]
    kinds = ("val", "test")
    ours, theirs = ([r for r in without_times(each.log.records) if r["kind"] in kinds] for each in (second, run))
    assert ours == theirs


def test_a_run_killed_between_checkpoints_gives_the_same_bits(data, whole, tmp_path):
    def die(step):
        if step == 8:
            raise RuntimeError("killed")
        return False

    with pytest.raises(RuntimeError, match="killed"):
        Run(TINY, data, tmp_path).train(pause=die)
    resumed = Run(TINY, data, tmp_path, resume=True)
    assert resumed.state.step == 6
    resumed.train()
    run, _, bits = whole
    assert same_bits(weights(resumed), bits)
    assert without_times(resumed.log.records) == without_times(run.log.records)


def train_in_a_fork(config, data_folder, out, begun):
    torch.set_num_threads(1)  # sums that are split among threads depend on their number
    given = config, load("listops", data_folder), out
    try:
        run = Run(*given)
    except FileExistsError:
        run = Run(*given, resume=True)
    begun.touch()
    run.train()


def wait_for(condition, process):
    deadline = time.monotonic() + 300
    while not condition():
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def one_thread():
    with threads(1):
        yield


@pytest.mark.usefixtures("one_thread")
def test_a_process_killed_at_any_moment_resumes_to_the_same_losses(data, tmp_path):
    """Killed between steps, in one, while a checkpoint is written, while it starts."""
    config = replace(TINY, steps=10**6, checkpoint_every=7, eval_every=50, log_every=1)
    draw = random.Random(0)
    for number in range(3):
        begun = tmp_path / f"begun{number}"
        process = interpreting().start(train_in_a_fork, (config, data.folder, tmp_path / "run", begun))
        wait_for(begun.exists, process)
        time.sleep(draw.uniform(0.0, 0.35))
        assert process.is_alive()
        process.kill()
        process.join()
    killed = Run(config, data, tmp_path / "run", resume=True)
    end = killed.state.step + 50
    killed.train(pause=lambda step: step == end)
    whole = Run(config, data, tmp_path / "whole")
    whole.train(pause=lambda step: step == end)
    assert whole.state.step == end and same_bits(weights(killed), weights(whole))
    assert without_times(killed.log.records) == without_times(whole.log.records)


def test_a_finished_run_can_be_prolonged(data, whole, tmp_path):
    config = replace(TINY, schedule="constant")
    Run(replace(config, steps=4), data, tmp_path / "short").train()
    longer = Run(config, data, tmp_path / "short", resume=True)
    longer.train()
    straight = Run(config, data, tmp_path / "straight")
    straight.train()
    assert same_bits(weights(longer), weights(straight))


KEEPS_BEST = replace(TINY, keep="best", eval_every=3, eval_examples=8, average=0.0, lr=0.05, schedule="constant")


def test_the_best_validation_is_what_is_tested_and_kept(data, tmp_path):
    best = Run(KEEPS_BEST, data, tmp_path / "best")
    metrics = best.train()
    last = Run(replace(KEEPS_BEST, keep="last"), data, tmp_path / "last")
    others = last.train()
    validations = {record["step"]: record["accuracy"] for record in best.log.of_kind("val")}
    assert list(validations) == [3, 6, 9, 11]
    step = max(validations, key=validations.__getitem__)
    assert (metrics["tested_step"], metrics["validation_accuracy"]) == (step, validations[step])
    assert step < 11, "else the test says nothing"
    assert same_bits(weights(best), weights(last))
    straight = Run(replace(KEEPS_BEST, keep="last", steps=step), data, tmp_path / "straight")
    assert straight.train()["test_loss"] == metrics["test_loss"] != others["test_loss"]
    assert others["tested_step"] == 11
    assert same_bits(load_file(tmp_path / "best/model.safetensors"), weights(straight))


@pytest.fixture(scope="module")
def whole_that_keeps_best(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole_that_keeps_best") / "run"
    metrics = Run(replace(KEEPS_BEST, average=0.5), data, folder).train()
    return metrics, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("stop", [2, 3, 5, 10])
def test_the_best_validation_survives_a_pause(whole_that_keeps_best, data, tmp_path, stop):
    expected, weights_of_whole = whole_that_keeps_best
    assert Run(replace(KEEPS_BEST, average=0.5), data, tmp_path / "run").train(pause=lambda step: step == stop) is None
    resumed = Run(replace(KEEPS_BEST, average=0.5), data, tmp_path / "run", resume=True)
    assert (resumed.best.step > 0) == (stop >= 3)
    metrics = resumed.train()
    for name in ("tested_step", "validation_accuracy", "test_loss"):
        assert metrics[name] == expected[name]
    assert same_bits(load_file(tmp_path / "run" / "model.safetensors"), weights_of_whole)


def test_a_run_that_keeps_its_best_is_validated_alike_to_its_end():
    with pytest.raises(ValueError, match="must keep its settings: --eval-examples was 8, got 16"):
        resumed(KEEPS_BEST, {"eval_examples": 16})
    with pytest.raises(ValueError, match="must keep its settings: --eval-every was 3, got 2"):
        resumed(KEEPS_BEST, {"eval_every": 2})
    assert resumed(KEEPS_BEST, {"eval_examples": 8, "steps": 20}).steps == 20
    assert resumed(TINY, {"eval_examples": 16}).eval_examples == 16


def test_the_best_is_not_chosen_by_the_test_split(data, tmp_path):
    with pytest.raises(ValueError, match="keep=best would choose the weights by the test split: listops has no other"):
        Run(KEEPS_BEST, replace(data, val=data.test), tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert all(configure(name, {"task": "text"}).keep == "last" for name in PRESETS if "text" in PRESETS[name])


def test_what_was_chosen_is_told_without_the_log(data, tmp_path):
    metrics = Run(KEEPS_BEST, data, tmp_path).train()
    (tmp_path / "log.jsonl").unlink()
    longer = Run(replace(KEEPS_BEST, steps=12), data, tmp_path, resume=True)
    longer.best.accuracy = metrics["validation_accuracy"] = 1.0
    again = longer.train()
    assert (again["tested_step"], again["validation_accuracy"]) == (metrics["tested_step"], 1.0)
    assert longer.log.of_kind("test")[-1]["tested_step"] == metrics["tested_step"]


def test_a_run_ends_with_its_time(data, tmp_path):
    run = Run(replace(TINY, steps=10**6, minutes=0.03, schedule="cosine"), data, tmp_path)
    metrics = run.train()
    assert 1.8 <= metrics["training_seconds"] < 60
    assert run.log.of_kind("train")[-1]["lr"] < 0.2 * TINY.lr


def test_starting_up_takes_none_of_a_runs_minutes(data, tmp_path, monkeypatch):
    FakeClock(monkeypatch)
    config = replace(TINY, minutes=3.5 / 60, schedule="cosine")
    assert Run(config, data, tmp_path).train(pause=lambda step: step == 2) is None
    metrics = Run(config, data, tmp_path, resume=True).train()
    assert (metrics["steps"], metrics["training_seconds"], metrics["startup_seconds"]) == (4, 4.0, 2000.0)
    assert [each["startup_seconds"] for each in read(tmp_path / "log.jsonl") if each["kind"] == "train"] == [
        1000,
        2000,
        2000,
    ]


def test_what_is_prepared_in_the_middle_of_a_run_is_no_training(data, tmp_path, monkeypatch):
    class PreparesLate(steps.Steps):
        calls = 0

        def __call__(self, batch, lr):
            self.calls += 1
            if self.calls == 3:
                self.prepare(batch)
            return super().__call__(batch, lr)

    FakeClock(monkeypatch)

    def steps_of(model, optimizer, config, device, data_parallel):
        return PreparesLate(model, optimizer, objective_of(config, device), device, data_parallel)

    monkeypatch.setattr(train, "steps_of", steps_of)
    config = replace(TINY, minutes=3.5 / 60, schedule="cosine", log_every=2)
    metrics = Run(config, data, tmp_path).train()
    assert (metrics["steps"], metrics["training_seconds"], metrics["startup_seconds"]) == (4, 4.0, 2000.0)


def test_starting_up_changes_no_bit(data, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "dry_run", lambda *_: None)
    run = Run(TINY, data, tmp_path)
    run.train()
    assert same_bits(weights(run), whole[2])


def test_buckets_leave_out_padding_and_no_example(data, whole, tmp_path):
    plain = Run(replace(TINY, buckets=False, steps=8), data, tmp_path)
    plain.train()
    unsorted, bucketed = ([r["padding"] for r in run.log.of_kind("train")] for run in (plain, whole[0]))
    assert 0 < sum(bucketed[:5]) < 0.8 * sum(unsorted[:5])
    assert sorted(row for step in range(8) for row in whole[0].order.rows(step)) == list(range(64))


def test_a_run_from_before_there_were_buckets_goes_on_without(data, tmp_path):
    Run(replace(TINY, buckets=False, steps=1), data, tmp_path).train()
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["config"]["buckets"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert saved_run(tmp_path)[0].buckets is False


def test_seeds_matter(data, whole, tmp_path):
    other = Run(replace(TINY, seed=1, steps=2), data, tmp_path)
    other.train()
    assert not same_bits(weights(other), whole[2])


def test_a_folder_with_a_run_is_not_written_over_unasked(data, tmp_path):
    short = replace(TINY, steps=2)
    Run(short, data, tmp_path).train()
    with pytest.raises(FileExistsError, match="holds a run; go on with it by --resume, replace it by --overwrite"):
        Run(short, data, tmp_path)
    again = Run(replace(short, steps=1), data, tmp_path, overwrite=True)
    assert not (tmp_path / "metrics.json").exists()
    again.train()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-00000001"]
    assert again.log.of_kind("train")[-1]["step"] == 1


def test_a_run_does_not_replace_the_one_whose_weights_it_begins_with(data, tmp_path):
    config = replace(TINY, steps=1, initial=str(tmp_path))
    Run(replace(config, initial=None), data, tmp_path).train()
    with pytest.raises(ValueError, match=r"--initial .* lies in .*, which --overwrite deletes: move it away"):
        Run(config, data, tmp_path, overwrite=True)
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "metrics.json").exists()


def test_a_checkpoint_alone_is_neither_written_over_unasked_nor_gone_on_with(data, tmp_path):
    Run(replace(TINY, steps=3), data, tmp_path).train()
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileExistsError, match="--overwrite"):
        Run(replace(TINY, steps=1), data, tmp_path)
    Run(replace(TINY, steps=1), data, tmp_path, overwrite=True).train()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-00000001"]


def test_resuming_needs_a_run_and_the_same_data(data, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no run to resume in"):
        saved_run(tmp_path / "nothing")
    Run(replace(TINY, steps=1), data, tmp_path / "run").train()
    with pytest.raises(ValueError, match=r"must see the same data: it began with \[64, 16, 24\] .* got \[16, 16, 24\]"):
        Run(TINY, replace(data, train=data.val), tmp_path / "run", resume=True)


def test_resuming_needs_the_same_examples_not_only_as_many(data, tmp_path):
    other = load("listops", generate(replace(DATA, seed=1), tmp_path, workers=1))
    Run(replace(TINY, steps=1), data, tmp_path / "run").train()
    with pytest.raises(ValueError, match=r"must see the same data: it began with ListOps, generated, seed 0, from"):
        Run(TINY, other, tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="must see the same data"):
        Run(TINY, replace(data, val=data.test, test=data.val), tmp_path / "run", resume=True)
    saved = json.loads((tmp_path / "run/config.json").read_text())
    del saved["data"]["hash"]  # of a run from before it was kept
    (tmp_path / "run/config.json").write_text(json.dumps(saved))
    Run(TINY, data, tmp_path / "run", resume=True)


def test_a_diverging_run_says_what_to_change(data, tmp_path):
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step \d+; lower --lr \(now 1e\+30\)"):
        Run(replace(TINY, lr=1e30, warmup=1, clip=0.0), data, tmp_path).train()
