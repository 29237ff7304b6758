import json
import sys
from types import SimpleNamespace

import pytest

from experiments.lra.data.listops.generator import generate
from experiments.training.tensorboard import TensorBoardLog
from tests.experiments.lra.commands import OPTIONS, call
from tests.experiments.lra.runs import DATA


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return generate(DATA, tmp_path_factory.mktemp("data"), workers=1)


@pytest.fixture
def written(monkeypatch):
    calls = []

    class Writer:
        def __init__(self, log_dir, purge_step=None):
            calls.append(("open", log_dir, purge_step))

        def add_scalar(self, tag, value, step):
            calls.append((tag, value, step))

        def close(self):
            calls.append(("close",))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    return calls


def test_tensorboard_gets_the_numbers_of_the_log(folder, tmp_path, written):
    result = call("train", "--tensorboard", data=folder, out=tmp_path, **OPTIONS)
    assert result.exit_code == 0, result.output
    assert written[0] == ("open", str(tmp_path / "tensorboard"), None)
    assert written[-1] == ("close",)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    expected = [
        (f"{record['kind']}/{name}", value, record["step"])
        for record in records
        for name, value in record.items()
        if name not in ("kind", "step")
    ]
    assert written[1:-1] == expected
    assert {"train/loss", "val/accuracy", "test/accuracy"} <= {tag for tag, *_ in expected}


def test_a_resumed_run_leaves_out_what_it_writes_again(folder, tmp_path, written):
    assert call("train", data=folder, out=tmp_path, pause_after=0, **OPTIONS).exit_code == 0
    assert call("train", "--resume", "--tensorboard", out=tmp_path).exit_code == 0
    assert written[0] == ("open", str(tmp_path / "tensorboard"), 2)


def test_a_run_without_tensorboard_says_so_before_it_begins(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    result = call("train", "--tensorboard", data=folder, out=tmp_path / "run", **OPTIONS)
    assert result.exit_code == 2
    assert "--tensorboard needs the package tensorboard: pip install tensorboard" in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("default")
def test_tensorboard_itself_reads_the_files(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed_at, losses in ((None, {1: 3.0, 2: 2.0}), (1, {2: 1.0})):
        with TensorBoardLog(tmp_path, resumed_at) as board:
            for step, loss in losses.items():
                board.show({"kind": "train", "step": step, "loss": loss})
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in found] == [(1, 3.0), (2, 1.0)]
