import csv
import json

import pytest
import torch
from typer.testing import CliRunner

from experiments.lm.cli import app
from experiments.lm.config import HELP, configure, resumed
from experiments.lm.sample import continued, opened
from experiments.lm.train import Run
from tests.experiments.lm.models import TINY, tiny, tokens
from tests.experiments.lm.rank_runs import KINDS, command, first_gradients, sharing_sequences
from tests.processes.forked import ranks


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tokens(tmp_path_factory.mktemp("lm"))


def started(store, out, processes):
    ranks(sharing_sequences, store.folder, out, 2, processes=processes)
    return json.loads((out / "found.json").read_text()), out


@pytest.fixture(scope="module")
def pair(store, tmp_path_factory):
    return started(store, tmp_path_factory.mktemp("pair"), 2)


@pytest.fixture(scope="module")
def square(store, tmp_path_factory):
    return started(store, tmp_path_factory.mktemp("square"), 4)


@pytest.fixture(scope="module")
def alone(store, tmp_path_factory):
    found, out = {}, tmp_path_factory.mktemp("alone")
    for name, changes in KINDS.items():
        run = Run(tiny(**changes), store, out / name)
        gradients = first_gradients(run)
        found[name] = out / name, run.train(), gradients
    return found


def records(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder):
    return [(each["kind"], each["step"], each["loss"]) for each in records(folder)]


def positions(folder):
    with open(folder / "positions.csv") as file:
        return [(row["begin"], row["end"], row["sequences"], float(row["loss"])) for row in csv.DictReader(file)]


def assert_alike(ours, theirs):
    assert [each[:-1] for each in ours] == [each[:-1] for each in theirs]
    assert [each[-1] for each in ours] == pytest.approx([each[-1] for each in theirs], abs=1e-5)


CASES = [*(("pair", name) for name in KINDS), ("square", "plain")]


@pytest.mark.parametrize(("processes", "name"), CASES)
def test_processes_that_share_sequences_train_as_one_does(processes, name, alone, request):
    found, out = request.getfixturevalue(processes)
    folder, metrics, gradients = alone[name]
    assert_alike(losses(out / name), losses(folder))
    assert_alike(positions(out / name), positions(folder))
    said = found[name]
    assert said["loss"] == pytest.approx(metrics["val_loss"], abs=1e-5)
    assert said["processes"] == (2 if processes == "pair" else 4)
    assert said["kinds"] == (["DTensor"] if name == "divided" else ["Parameter"])
    # Adam divides by their size, so training alone would hardly show a wrong factor.
    for rank in range(said["processes"]):
        ours = torch.load(out / name / f"gradients{rank}.pt")
        assert ours.keys() == gradients.keys()
        for parameter, expected in gradients.items():
            torch.testing.assert_close(ours[parameter], expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("processes", "name"), CASES)
def test_a_resumed_run_gives_the_same_bits(processes, name, request):
    found, out = request.getfixturevalue(processes)
    assert found[name]["at"] == 3 and found[name]["resumed"] == found[name]["loss"]
    assert losses(out / f"{name}-parts")[-1] == losses(out / name)[-1]


def test_one_process_goes_on_where_those_that_share_sequences_stopped(pair, store, alone):
    again = Run(tiny(**KINDS["plain"]), store, pair[1] / "half", resume=True)
    assert again.state.step == 4
    again.train()
    assert_alike(losses(pair[1] / "half"), losses(alone["plain"][0]))


def test_samples_come_from_one_process(pair):
    model, config, tokenizer = opened(pair[1] / "plain", torch.device("cpu"))
    (begun,) = tokenizer.encode(["Text"])
    added = continued(model, begun.tolist(), 3, context=config.context, temperature=0, top=0, seed=0)
    assert config.context_parallel == 2 and len(added) == 3


def test_mistakes_reach_every_process(pair, square):
    other = "ValueError: context_parallel must be 2, as in the running processes; got 1"
    assert pair[0]["other"] == square[0]["other"] == other
    assert square[0]["batch"] == (
        "ValueError: the sequences of a batch must be a multiple of the number of groups of 2 processes, 2, which "
        "share them; got 1: change --batch-tokens"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": "sdpa"}, "attention must be sparseflash if context_parallel is above 1; got sdpa"),
        ({"compiled": "model"}, "compiled must be block or none if context_parallel is above 1; got model"),
        ({"context": 31}, "at least 2 blocks of 16 tokens, .*; got 1: lower --block or .* or raise --context"),
        ({"context_parallel": 0}, "context_parallel must be at least 1; got 0"),
    ],
)
def test_settings_with_which_sequences_cannot_be_shared_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny(**{"context_parallel": 2, **settings})


def test_a_process_has_its_share_of_the_tokens_of_a_part():
    assert [tiny(micro_tokens=128, context_parallel=count).part for count in (1, 2, 4)] == [2, 4, 8]


def test_a_run_may_go_on_with_other_processes_and_layers_computed_again():
    changed = resumed(tiny(), {"context_parallel": 2, "recompute": True})
    assert (changed.context_parallel, changed.recompute) == (2, True)
    with pytest.raises(ValueError, match="compiled must be block or none if layers are recomputed; got model"):
        configure("cpu", {"recompute": True, "compiled": "model"})


def test_a_lone_process_is_refused_on_the_command_line(store):
    words = ["train", "--preset", "cpu", "--data", str(store.folder), "--context-parallel", "2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "context_parallel must divide the number of processes, 1; got 2" in done.stderr
    help_text = CliRunner().invoke(app, ["compare", "--help"], env={"COLUMNS": "200"}).stdout
    assert "--sharding" in help_text and "--context-parallel" not in help_text
    assert "Processes that share the tokens of each sequence" in HELP["context_parallel"]


def test_the_command_shares_sequences(store, tmp_path):
    changes = {**TINY, "steps": 2, "context_parallel": 2, "data": store.folder, "out": tmp_path / "run"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in changes.items() if value is not None]
    ranks(command, ["train", "--preset=cpu", *words], processes=2)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (metrics["processes"], metrics["config"]["context_parallel"], metrics["peak_memory"]) == (2, 2, None)
