import csv
import json
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from experiments.lm import cli, train
from experiments.lm.cli import app
from experiments.lm.compare_report import begun_with
from experiments.lm.config import resumed
from experiments.lm.sample import continued
from experiments.lm.sample import opened as opened_model
from experiments.lm.train import Run, saved_run
from experiments.training import tensor_files
from experiments.training.fingerprint import sha256
from tests.experiments.lm.models import TINY, tiny, tokens
from tests.experiments.lm.rank_runs import whole_and_divided
from tests.processes.forked import interpreting, python, ranks, started


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tokens(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm-run") / "whole"
    return folder, Run(tiny(), store, folder).train()


def weights(folder):
    return load_file(folder / "model.safetensors")


def same_bits(folder, other):
    a, b = weights(folder), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_resumed_run_gives_the_same_bits(store, whole, tmp_path):
    folder = tmp_path / "parts"
    assert Run(tiny(), store, folder).train(pause=lambda step: step == 4) is None
    torch.manual_seed(99)
    again = Run(tiny(), store, folder, resume=True)
    assert again.state.step == 4
    again.train()
    assert same_bits(folder, whole[0])


def test_so_does_one_that_was_killed(store, tmp_path):
    changes = {**TINY, "steps": 24, "checkpoint_every": 2, "log_every": 1, "validate_every": 1000}
    chosen = {f"--{name.replace('_', '-')}={value}" for name, value in changes.items() if value is not None}
    words = ["--preset=cpu", f"--data={store.folder}", *sorted(chosen), "--minutes=60"]
    command = "-m", "experiments.lm", "train"

    def run(*more):
        done = python(*command, *more, server=interpreting())
        assert done.returncode == 0, done.stdout + done.stderr

    killed, straight = tmp_path / "killed", tmp_path / "straight"
    process = started(*command, *words, f"--out={killed}", server=interpreting(), folder=tmp_path)
    while not list(killed.glob("checkpoint-*")):
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    assert not (killed / "metrics.json").exists()
    run("--resume", f"--out={killed}")
    run(*words, f"--out={straight}")
    assert same_bits(killed, straight)


def test_a_run_begins_with_the_weights_of_a_shorter_context(store, whole, tmp_path):
    folder, before = whole
    config = tiny(initial=str(folder), context=128, pattern="local", steps=2, log_every=1, lr=1e-9)
    metrics = Run(config, store, tmp_path / "longer").train()
    assert metrics["first_loss"] < before["first_loss"] - 0.1 and metrics["val_loss"] < before["val_loss"] + 0.5
    told = {
        "pattern": "dense", "context": 64, "tokens": before["tokens"], "seconds": before["seconds"], "before": None
    }  # fmt: skip
    assert metrics["initial"] == {**told, "sha256": sha256(folder / "model.safetensors")}
    # The record names the initial weights, not the paused run.
    again = replace(config, initial=str(tmp_path / "longer"))
    assert Run(again, store, tmp_path / "again").train(pause=lambda step: step == 1) is None
    resumed_run = Run(again, store, tmp_path / "again", resume=True).train()
    assert resumed_run["initial"]["before"] == metrics["initial"] and resumed_run["initial"]["context"] == 128


def test_a_run_begins_with_weights_that_do_not_tell_how_long_they_were_trained(store, whole, tmp_path):
    """Weights from before --initial existed."""
    path = tmp_path / "model.safetensors"
    tensors, about = tensor_files.read(whole[0], train.KIND)
    tensor_files.write(path, tensors, {name: about[name] for name in ("kind", "config", "steps")})
    told = Run(tiny(initial=str(path)), store, tmp_path / "new").before
    assert told["seconds"] is None and told["before"] is None
    assert begun_with(told).endswith("tokens, minutes unknown")


def test_a_run_does_not_replace_the_one_whose_weights_it_begins_with(store, whole):
    folder, _ = whole
    for initial in (folder, folder / "model.safetensors"):
        with pytest.raises(ValueError, match=r"--initial .* lies in .*, which --overwrite deletes: move it away"):
            Run(tiny(initial=str(initial)), store, folder, overwrite=True)
    assert (folder / "model.safetensors").exists() and (folder / "metrics.json").exists()


def test_weights_that_mean_something_else_are_refused(store, whole, tmp_path):
    begun = {"initial": str(whole[0])}
    for changes in ({"width": 32}, {"depth": 3}, {"head_dim": 16}, {"positions": "learned"}):
        with pytest.raises(ValueError, match="must hold a model of this run's depth, width, head_dim, kv_heads, "):
            Run(tiny(**begun, **changes), store, tmp_path / "other")
    pairs = tokens(tmp_path, vocabulary=257 + 20)
    with pytest.raises(ValueError, match=r"must hold a model of the tokens in .*; its vocabulary differs"):
        Run(tiny(**begun), replace(pairs, about={**pairs.about, "vocabulary": 257}), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "changes",
    [{"attention": "sdpa"}, {"pattern": "local,dense", "documents": "separate"}, {"precision": "bf16"}],
    ids=["sdpa", "documents", "bf16"],
)
def test_runs_of_every_kind_learn(store, tmp_path, changes):
    metrics = Run(tiny(steps=40, validate_every=40, lr=3e-3, **changes), store, tmp_path / "run").train()
    assert metrics["val_loss"] < 0.8 * metrics["first_loss"]


def test_parts_of_a_batch_add_up(store, whole, tmp_path):
    metrics = Run(tiny(micro_tokens=256), store, tmp_path / "run").train()
    assert metrics["val_loss"] == pytest.approx(whole[1]["val_loss"], abs=1e-5)


def test_results_are_complete(store, whole):
    folder, metrics = whole
    assert metrics["steps"] == 6 and metrics["tokens"] == 6 * 256 and metrics["parameters"] > 100_000
    with open(folder / "positions.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["begin"]) for row in rows] == [0, 1, 2, 4, 8, 16, 32]
    mean = sum((int(row["end"]) - int(row["begin"])) * float(row["loss"]) for row in rows) / 64
    assert mean == pytest.approx(metrics["val_loss"], abs=1e-4)


def test_two_processes_train_as_one_with_whole_or_divided_weights(store, whole, tmp_path):
    ranks(whole_and_divided, store.folder, tmp_path, processes=2)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ddp"]["kinds"] == ["Parameter"] and found["fsdp"]["kinds"] == ["DTensor"]
    for sharding in ("ddp", "fsdp"):
        assert found[sharding]["processes"] == 2 and found[sharding]["at"] == 3
        assert found[sharding]["loss"] == found[sharding]["resumed"]
        assert found[sharding]["loss"] == pytest.approx(whole[1]["val_loss"], abs=1e-5)
        ours, alone = weights(tmp_path / sharding), weights(whole[0])
        for name in alone:
            torch.testing.assert_close(ours[name], alone[name], atol=2e-4, rtol=1e-3)


def test_a_sample_is_that_of_the_model_and_its_seed(whole):
    model, config, tokenizer = opened_model(whole[0], torch.device("cpu"))
    (begun,) = tokenizer.encode(["Text"])
    settings = {"context": config.context, "temperature": 1.0, "top": 0}
    first, second, other = (continued(model, begun.tolist(), 12, seed=seed, **settings) for seed in (0, 0, 1))
    assert first == second != other
    row = begun.tolist() + first[:3]
    ids = torch.zeros(1, 64, dtype=torch.int64)
    ids[0, : len(row)] = torch.tensor(row)
    best = model.scores(ids, len(row) - 1).argmax().item()
    assert continued(model, row, 1, seed=0, context=64, temperature=0.0, top=0) == [best]


def test_settings_that_change_a_run_are_refused_and_text_that_has_changed(store, whole, tmp_path):
    config, folder, text = saved_run(whole[0])
    assert (folder, text) == (store.folder, store.about["hash"]) and resumed(config, {"steps": 9}).steps == 9
    with pytest.raises(ValueError, match="--width was 64, got 128; start another run"):
        resumed(config, {"width": 128})
    with pytest.raises(ValueError, match="--vocabulary must be at least the 257 tokens"):
        Run(tiny(vocabulary=256), store, tmp_path / "run")
    other = tokens(tmp_path / "other", share=0.3)
    with pytest.raises(ValueError, match="a resumed run must see the same tokens"):
        Run(tiny(), other, whole[0], resume=True)
    with pytest.raises(ValueError, match="flex must have a GPU"):
        Run(tiny(attention="flex"), store, tmp_path / "run")
    with pytest.raises(ValueError, match="--initial was None, got elsewhere; start another run"):
        resumed(config, {"initial": "elsewhere"})


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--preset", "cpu"], "--data must name a folder of text"),
        (["train", "--preset", "124M"], "give --minutes or --steps"),
        (["train", "--resume"], "--resume needs --out"),
        (["bench", "--case", "cpu:2K"], "a case must be presets:contexts:patterns:implementations"),
        (["bench", "--case", "cpu:2M:dense:sdpa"], "a context must be a number of tokens"),
        (["bench", "--case", "cpu:2K:dense:fast"], "the implementations of a case must be from"),
    ],
)
def test_wrong_commands_say_what_to_change(words, message):
    done = invoke(*words)
    assert done.exit_code == 2 and message in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "nowhere"], "there is no folder nowhere"),
        (["--from", "text"], "there is no folder text"),
        (["--from", "empty"], "there must be UTF-8 files of 64 bytes"),
        (["--out", "text"], "text must be empty, or hold tokens that are replaced; choose another --out"),
        (["--out", "text/inside"], "[Errno 20] Not a directory: 'text/inside"),
        (["--megabytes", "inf"], "--megabytes must be a positive number; got inf"),
        (["--megabytes", "nan"], "--megabytes must be a positive number; got nan"),
        (["--megabytes", "0"], "--megabytes must be a positive number; got 0"),
        (["--validation", "2"], "--validation must be between 0 and 1; got 2"),
        (["--validation", "nan"], "--validation must be between 0 and 1; got nan"),
    ],
)
def test_a_corpus_that_cannot_be_made_says_why(store, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("a file")
    given = {"--from": store.folder.parent / "texts", "--vocabulary": 256, "--validation": 0.2, "--out": "made"}
    given |= dict([words])
    done = invoke("corpus", *(each for pair in given.items() for each in pair))
    assert done.exit_code == 2 and done.stderr.startswith(f"Error: {message}"), done.output
    assert (tmp_path / "text").read_text() == "a file"


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "x"), NotADirectoryError(20, "Not a directory", "x")]
)
def test_what_the_system_refuses_is_one_line(monkeypatch, error):
    def find(*arguments):
        raise error

    monkeypatch.setattr(cli, "find", find)
    done = invoke("corpus")
    assert done.exit_code == 2 and done.stderr == f"Error: {error}\n", done.output


def test_corpus_show_and_sample_work_on_the_command_line(store, whole, tmp_path):
    made = invoke(
        "corpus", "--from", store.folder.parent / "texts", "--vocabulary", 300, "--validation", 0.2, "--megabytes", 1,
        "--out", tmp_path / "made",
    )  # fmt: skip
    assert made.exit_code == 0 and (tmp_path / "made" / "tokenizer.json").is_file(), made.output
    shown = invoke("show", whole[0], "--out", tmp_path / "runs.png")
    assert shown.exit_code == 0 and "whole" in shown.stdout and (tmp_path / "runs.png").stat().st_size > 1000
    said = invoke("sample", whole[0], "--tokens", 3, "--prompt", "Text", "--device", "cpu")
    assert said.exit_code == 0 and said.stdout.startswith("Text")
