from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments.lra.data.listops.generator import generate
from experiments.lra.tasks import load
from experiments.lra.train import Run
from experiments.training import checkpoint
from experiments.training.tensor_files import split
from tests.experiments.lra.runs import DATA, TINY, same_bits, weights


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return load("listops", generate(DATA, tmp_path_factory.mktemp("data"), workers=1))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    run = Run(replace(TINY, steps=3), data, tmp_path_factory.mktemp("whole") / "run")
    run.train()
    return run


def test_checkpoint_files_stay_below_their_limit_and_lose_nothing(data, run, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "PART_BYTES", 20_000)
    saved = checkpoint.save(tmp_path, checkpoint.Progress(5, 1.5), run.model, run.optimizer)
    parts = sorted(saved.glob("part-*.safetensors"))
    assert len(parts) > 3
    assert all(path.stat().st_size <= 20_000 for path in parts)
    names = [name for part in parts for name in load_file(part)]
    assert len(names) == len(set(names))
    other = Run(replace(TINY, seed=5), data, tmp_path / "other")
    assert checkpoint.load(saved, other.model, other.optimizer) == checkpoint.Progress(5, 1.5)
    assert same_bits(weights(other), weights(run))
    ours, theirs = (r.optimizer.state_dict()["state"] for r in (other, run))
    assert all(torch.equal(ours[i][key], theirs[i][key]) for i in theirs for key in theirs[i])


def test_a_checkpoint_has_the_random_state_of_the_gpu_that_it_ran_on(monkeypatch):
    asked = []

    def state_of(device="cuda"):
        asked.append(torch.device(device))
        return torch.zeros(1)

    monkeypatch.setattr(torch.cuda, "get_rng_state", state_of)
    second = SimpleNamespace(device=torch.device("cuda:1"), is_cuda=True)
    model = SimpleNamespace(state_dict=dict, named_parameters=list, parameters=lambda: iter([second]))
    optimizer = SimpleNamespace(state_dict=lambda: {"state": {}}, param_groups=[])
    random = [checkpoint.random_state(second.device)]
    assert list(checkpoint.collected(model, optimizer, None, random)) == ["random.cpu", "random.cuda"]
    assert asked == [second.device]


def test_a_tensor_above_the_limit_has_a_file_of_its_own():
    tensors = {"small": torch.zeros(2), "large": torch.zeros(1000), "last": torch.zeros(2)}
    assert [list(part) for part in split(tensors, 600)] == [["small"], ["large"], ["last"]]


def test_checkpoints_of_another_format_are_refused(run, tmp_path):
    saved = checkpoint.save(tmp_path, checkpoint.Progress(5, 1.5), run.model, run.optimizer)
    (saved / "state.json").write_text('{"format": 0, "step": 5, "seconds": 1.5}')
    with pytest.raises(ValueError, match="must have the checkpoint format 1"):
        checkpoint.load(saved, run.model, run.optimizer)


def in_parts(run, folder, step, monkeypatch):
    monkeypatch.setattr(checkpoint, "PART_BYTES", 20_000)
    saved = checkpoint.save(folder, checkpoint.Progress(step, 1.5), run.model, run.optimizer, run.average)
    assert len(list(saved.glob("part-*"))) > 3
    return saved


@pytest.mark.parametrize("which", [0, -1])
def test_a_checkpoint_that_lacks_a_part_is_refused(run, monkeypatch, tmp_path, which):
    saved = in_parts(run, tmp_path, 5, monkeypatch)
    gone = sorted(saved.glob("part-*"))[which]
    gone.unlink()
    with pytest.raises(ValueError, match=f"must be whole; it lacks {gone.name}$"):
        checkpoint.load(saved, run.model, run.optimizer, run.average)
    with pytest.raises(ValueError, match=f"it lacks {gone.name}. Copy what is missing"):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optimizer.head.2.bias.", "optimiser's state of every parameter; head.2.bias has none"),
        ("optimizer.", "optimiser's state of every parameter"),
        ("random.cpu", "random state of process 0"),
    ],
)
def test_a_checkpoint_that_lacks_a_state_is_refused(data, tmp_path, name, message):
    run = Run(replace(TINY, steps=1), data, tmp_path)
    run.train()
    (part,) = checkpoint.checkpoints(tmp_path)[-1].glob("part-*")
    save_file({key: tensor for key, tensor in load_file(part).items() if not key.startswith(name)}, part)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(part.parent, run.model, run.optimizer, run.average)


def test_a_run_goes_on_from_the_newest_whole_checkpoint_and_replaces_the_others(run, monkeypatch, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    older, newer = (in_parts(run, tmp_path / name, step, monkeypatch) for name, step in (("a", 5), ("b", 6)))
    newer = newer.rename(tmp_path / "a" / newer.name)
    assert checkpoint.newest(tmp_path / "a") == newer
    (newer / "state.json").unlink()
    assert checkpoint.checkpoints(tmp_path / "a") == [older]
    assert checkpoint.newest(tmp_path / "a") == older
    again = checkpoint.save(tmp_path / "a", checkpoint.Progress(6, 1.5), run.model, run.optimizer)
    assert checkpoint.folders(tmp_path / "a") == [again] == [newer]
    assert checkpoint.newest(tmp_path / "b") is None


def test_a_checkpoint_of_the_same_step_says_what_is_so_now(run, tmp_path):
    for stage in (1, 2):
        progress = checkpoint.Progress(5, 1.5, {"stage": stage})
        saved = checkpoint.save(tmp_path, progress, run.model, run.optimizer)
    assert checkpoint.load(saved, run.model, run.optimizer) == progress


def test_a_failing_save_keeps_the_older_checkpoint(run, monkeypatch, tmp_path):
    older = checkpoint.save(tmp_path, checkpoint.Progress(5, 1.5), run.model, run.optimizer)
    monkeypatch.setattr(checkpoint, "save_file", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path, checkpoint.Progress(6, 2.0), run.model, run.optimizer)
    assert list(tmp_path.iterdir()) == [older]


def test_what_a_kill_left_half_written_is_removed(run, tmp_path):
    (tmp_path / ".checkpoint-abc").mkdir()
    saved = checkpoint.save(tmp_path, checkpoint.Progress(5, 1.5), run.model, run.optimizer)
    assert checkpoint.checkpoints(tmp_path) == list(tmp_path.iterdir()) == [saved]
