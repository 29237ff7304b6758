import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from experiments.lra.cli import app
from experiments.lra.config import HELP
from experiments.lra.data.listops.generator import generate
from experiments.lra.train import Run, check
from experiments.pathfinder.generate import Settings
from experiments.pathfinder.generate import generate as generate_images
from experiments.pathfinder.parameters import lra
from experiments.training.distributed import Ranks, process_group
from tests.experiments.lra.rank_runs import KINDS, SHARED, data_of, first_gradients, sharing_sequences
from tests.experiments.lra.runs import DATA, same_bits, weights
from tests.processes.forked import execute, ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    out = tmp_path_factory.mktemp("data")
    images = generate_images(Settings(lra(32, 14), 64), out / "images", workers=1)
    return {"listops": generate(DATA, out, workers=1), "pathfinder32": images}


def started(folders, out, processes, context):
    ranks(sharing_sequences, out, context, folders, processes=processes)
    return [json.loads((out / f"process{rank}.json").read_text()) for rank in range(processes)], out


@pytest.fixture(scope="module")
def pair(folders, tmp_path_factory):
    return started(folders, tmp_path_factory.mktemp("pair"), 2, 2)


@pytest.fixture(scope="module")
def square(folders, tmp_path_factory):
    return started(folders, tmp_path_factory.mktemp("square"), 4, 2)


@pytest.fixture(scope="module")
def alone(folders, tmp_path_factory):
    run = Run(SHARED, data_of(SHARED, folders), tmp_path_factory.mktemp("alone") / "run")
    return run, run.train()


def records(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def assert_same_course(ours, theirs):
    assert [(each["kind"], each["step"]) for each in ours] == [(each["kind"], each["step"]) for each in theirs]
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(yours["loss"], rel=1e-4)
        assert mine.get("auxiliary", 0.0) == pytest.approx(yours.get("auxiliary", 0.0), rel=2e-4)
        assert mine.get("examples") == yours.get("examples")


@pytest.mark.parametrize("processes", ["pair", "square"])
def test_processes_that_share_sequences_train_as_one_does(processes, alone, request):
    seen, out = request.getfixturevalue(processes)
    run, metrics = alone
    found = records(out / "plain")
    assert_same_course(found, run.log.records)
    assert found[29]["loss"] < found[0]["loss"] - 0.05  # so that wrong gradients would show
    models = [torch.load(out / f"process{rank}.pt") for rank in range(len(seen))]
    assert all(same_bits(models[0], other) for other in models[1:])
    for name, expected in weights(run).items():
        torch.testing.assert_close(models[0][name], expected, atol=1e-4, rtol=1e-3)
    for each in seen:
        assert each["loss"] == pytest.approx(metrics["test_loss"], rel=2e-4)
        assert (each["examples"], each["processes"]) == (24, len(seen))


@pytest.mark.parametrize("processes", ["pair", "square"])
def test_gradients_are_those_of_one_process(processes, folders, tmp_path, request):
    """Adam divides by their size, so training alone would hardly show a wrong factor."""
    seen, out = request.getfixturevalue(processes)
    expected = first_gradients(Run(SHARED, data_of(SHARED, folders), tmp_path / "run"))
    for rank in range(len(seen)):
        found = torch.load(out / f"gradients{rank}.pt")
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4, msg=lambda text, n=name: n + text)


def test_those_that_share_a_sequence_have_the_same_share_of_a_batch(pair, square, alone):
    whole = alone[0].order.rows(0).tolist()
    assert [each["rows"] for each in pair[0]] == [whole, whole]
    assert [each["rows"] for each in square[0]] == [whole[0::2]] * 2 + [whole[1::2]] * 2


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_trains_as_in_one_process(name, pair, folders, tmp_path):
    run = Run(KINDS[name], data_of(KINDS[name], folders), tmp_path / "run")
    run.train()
    assert_same_course(records(pair[1] / name), run.log.records)


def test_it_resumes_with_the_same_bits(pair):
    for each in pair[0]:
        assert (each["resumed_at"], each["same_bits"]) == (3, True)
    assert pair[0][0]["random"] != pair[0][1]["random"]


def test_one_process_goes_on_where_those_that_share_sequences_stopped(pair, folders, alone):
    folder = pair[1] / "half"
    resumed = Run(SHARED, data_of(SHARED, folders), folder, resume=True)
    assert resumed.state.step == 20
    resumed.train()
    assert_same_course(resumed.log.of_kind("train"), alone[0].log.of_kind("train"))


def test_mistakes_reach_every_process(pair, square):
    for each in pair[0]:
        assert each["other"] == "ValueError: context_parallel must be 2, as in the running processes; got 1"
    for each in square[0]:
        assert each["batch"] == (
            "ValueError: the sequences of a batch must be a multiple of the number of groups of 2 processes, 2, which "
            "share them; got 7: change --batch"
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": "sdpa"}, "attention must be sparseflash if context_parallel is above 1; got sdpa"),
        ({"max_tokens": 20, "block": 16, "context_parallel": 3},
         "at least 3 blocks of 16 tokens, one for each process of context_parallel; got 2: lower --block or --context"),
        ({"context_parallel": 0}, "context_parallel must be at least 1; got 0"),
    ],
)  # fmt: skip
def test_settings_with_which_sequences_cannot_be_shared_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(SHARED, **{"context_parallel": 2, **settings})


def test_those_that_share_a_sequence_drop_the_same_weights_and_others_other_ones(pair, square):
    assert pair[0][0]["kept"] == pair[0][1]["kept"]
    first, second, third, fourth = (each["kept"] for each in square[0])
    assert first == second == pair[0][0]["kept"] != third == fourth


def coarse(q_len, *, block):
    from sparseflash import masks

    return masks.causal(q_len, block=2 * block)


def test_a_mask_with_larger_blocks_is_refused():
    config = replace(SHARED, mask=f"{__file__}:coarse", context_parallel=2)
    with pytest.raises(ValueError, match=r"at most --block 16 tokens .*; got 32 x 32: raise --block"):
        check(config)
    check(replace(config, context_parallel=1))


def test_the_processes_must_be_a_multiple(monkeypatch):
    message = "context_parallel must divide the number of processes, 1; got 2: start 2, or a multiple, by torchrun"
    with pytest.raises(ValueError, match=message), process_group("cpu", 2):
        pass
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="must divide the number of processes, 4; got 3"), process_group("cpu", 3):
        pass


def test_neighbouring_ranks_share_sequences():
    six = [Ranks(rank, 6, context_parallel=3) for rank in range(6)]
    assert [(each.data_parallel_rank, each.data_parallel_ranks) for each in six] == [(0, 2)] * 3 + [(1, 2)] * 3


def test_short_batches_have_a_block_for_every_process():
    shape = replace(SHARED, context_parallel=2).shape
    assert [shape.row(tokens) for tokens in (1, 32, 33)] == [32, 32, 48]
    assert SHARED.shape.row(1) == 16


def test_the_demo_and_a_lone_process_are_refused_on_the_command_line():
    for words, message in (
        (["--preset", "demo"], "the demo runs in one process: leave out --context-parallel"),
        (["--steps", "1"], "context_parallel must divide the number of processes, 1; got 2"),
        (["--attention", "sdpa"], "attention must be sparseflash if context_parallel is above 1"),
    ):
        result = CliRunner().invoke(app, ["train", "--context-parallel", "2", *words])
        assert result.exit_code == 2 and message in result.output


def test_the_command_shares_sequences(folders, tmp_path):
    words = (
        "--context-parallel 2 --steps 2 --batch 4 --block 16 --depth 1 --width 16 --heads 1 --mlp 16 --max-tokens 40"
    )
    command = ["-m", "experiments.lra", "train", "--data", folders["listops"], "--out", tmp_path / "run", "--device"]
    ranks(execute, *command, "cpu", *words.split(), processes=2)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (metrics["processes"], metrics["config"]["context_parallel"]) == (2, 2)
    words = "-m", "experiments.lra", "test", tmp_path / "run", "--data", folders["listops"]
    (printed,) = ranks(execute, *words, processes=1)
    assert "accuracy" in printed
    assert "Processes that share the tokens of each sequence" in HELP["context_parallel"]
