import json

import pytest
import torch

from experiments.lra.data.listops.generator import generate
from experiments.lra.tasks import load
from experiments.lra.train import Run
from experiments.training.distributed import Ranks, find_device, require_single_process, world_size
from tests.experiments.lra.rank_runs import TINY, sharing_batches
from tests.experiments.lra.runs import DATA, same_bits, weights
from tests.processes.forked import ranks
from tests.processes.torchrun import torchrun


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return generate(DATA, tmp_path_factory.mktemp("data"), workers=1)


@pytest.fixture(scope="module")
def pair(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("pair")
    ranks(sharing_batches, folder, out, processes=2)
    return [json.loads((out / f"process{rank}.json").read_text()) for rank in (0, 1)], out


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    run = Run(TINY, load("listops", folder), tmp_path_factory.mktemp("alone") / "run")
    return run, run.train()


def assert_close(ours, theirs):
    """A step of Adam moves each weight by about the learning rate, 3e-3."""
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, atol=2e-6, rtol=1e-4)


def test_two_processes_train_as_one_does(pair, alone):
    seen, out = pair
    run, metrics = alone
    assert [(each["rank"], each["count"], each["processes"]) for each in seen] == [(0, 2, 2), (1, 2, 2)]
    for step in range(3):
        shares = [each["rows"][step] for each in seen]
        assert [len(share) for share in shares] == [4, 4]
        assert sorted(shares[0] + shares[1]) == sorted(run.order.rows(step).tolist())
    first, second = (torch.load(out / f"process{rank}.pt") for rank in (0, 1))
    assert same_bits(first, second)
    assert_close(first, weights(run))
    assert seen[0]["loss"] == pytest.approx(metrics["test_loss"], rel=1e-5)
    assert seen[0]["examples"] == metrics["test_examples"] == 24


def test_the_log_is_of_all_processes_together(pair, alone):
    records = [json.loads(line) for line in (pair[1] / "plain" / "log.jsonl").read_text().splitlines()]
    expected = alone[0].log.records
    assert [(each["kind"], each["step"]) for each in records] == [(each["kind"], each["step"]) for each in expected]
    for ours, theirs in zip(records, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["accuracy"] == pytest.approx(theirs["accuracy"])
        assert ours.get("examples") == theirs.get("examples")


def test_two_processes_resume_with_the_same_bits(pair):
    seen, _ = pair
    for each in seen:
        assert (each["resumed_at"], each["same_bits"]) == (3, True)
    assert seen[0]["random"] != seen[1]["random"]


def test_mistakes_reach_every_process(pair):
    for each in pair[0]:
        assert each["batch"] == (
            "ValueError: the sequences of a batch must be a multiple of the number of processes, 2, which share them; "
            "got 7: change --batch"
        )
        assert "holds a run; go on with it by --resume" in each["held"]


def test_one_process_goes_on_where_two_stopped(pair, folder, alone):
    resumed = Run(TINY, load("listops", folder), pair[1] / "half", resume=True)
    assert resumed.state.step == 3
    resumed.train()
    assert_close(weights(resumed), weights(alone[0]))


def test_the_command_under_torchrun_says_everything_once(folder, tmp_path):
    words = ["train", "--data", folder, "--out", tmp_path / "runs", "--seeds", "0,1", "--steps", 2, "--batch", 4]
    sizes = [
        "--block", 16, "--depth", 1, "--width", 16, "--heads", 1, "--mlp", 16, "--max-tokens", 40, "--device", "cpu",
    ]  # fmt: skip
    done = torchrun("-m", "experiments.lra", *words, *sizes)
    assert "FutureWarning" not in done.stderr, done.stderr
    assert done.stdout.count("mean ± std") == done.stdout.count("seed0: BlockMask") == 1
    metrics = [json.loads((tmp_path / "runs" / f"seed{seed}" / "metrics.json").read_text()) for seed in (0, 1)]
    assert [each["processes"] for each in metrics] == [2, 2]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "seed0",
        "seed1",
        "seeds.json",
        "summary.json",
    ]


def test_without_torchrun_there_is_one_process(monkeypatch):
    assert world_size() == 1
    lone = Ranks()
    assert (lone.first, lone.broadcast(0.5), lone.gather("x"), lone.first_before_others(lambda: 3)) == (
        True,
        0.5,
        ["x"],
        3,
    )
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="table runs in one process; start it without torchrun"):
        require_single_process("table")


def test_each_process_has_its_own_gpu(monkeypatch):
    for name, value in (
        ("TORCHELASTIC_RUN_ID", "a"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("LOCAL_RANK", "3"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert find_device("auto") == find_device("cuda") == torch.device("cuda:3")
    assert find_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="each process its own GPU: the device must be cuda or auto; got 'cuda:1'"):
        find_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="torchrun started 4 here, and PyTorch sees 2 GPUs; lower --nproc-per-node"):
        find_device("auto")


def test_unknown_devices_are_refused():
    assert find_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ValueError, match="the device must be auto, cpu, cuda or cuda:<number>; got 'tpu'"):
        find_device("tpu")
    with pytest.raises(ValueError, match="got 'meta'"):
        find_device("meta")
    with pytest.raises(ValueError, match=r"PyTorch sees \d+ GPUs here; got the device 'cuda:99'"):
        find_device("cuda:99")
