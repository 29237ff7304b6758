import json
import re
import shlex
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from experiments.lra import cli, demo
from experiments.lra.config import DEFAULTS, HELP, configure, resumed
from experiments.lra.data.listops.generator import Settings, generate
from experiments.lra.model import masks
from experiments.lra.presets import PRESETS
from experiments.training import steps
from experiments.training.signals import stop_caught
from experiments.training.steps import compute_gradients
from sparseflash.cli.expression import mask_of
from tests.experiments.lra.commands import OPTIONS, WINDOW, call
from tests.experiments.lra.runs import DATA, TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return generate(DATA, tmp_path_factory.mktemp("data"), workers=1)


def test_train_trains_and_reports_beside_the_baselines(folder, tmp_path):
    result = call("train", data=folder, out=tmp_path / "run", **OPTIONS)
    assert result.exit_code == 0, result.output
    assert "listops (generated data), 24 test examples" in result.output
    assert re.search(r"majority class +│? *0\.\d+", result.output)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["config"] == {**vars(TINY), "window": DEFAULTS["window"]}
    assert metrics["data"]["origin"] == "ListOps, generated, seed 0"


def test_train_pauses_and_resumes(folder, tmp_path):
    result = call("train", data=folder, out=tmp_path, pause_after=0, **OPTIONS)
    assert result.exit_code == 0, result.output
    assert "Paused at step 1" in result.output
    result = call("train", "--resume", out=tmp_path)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "metrics.json").read_text())["steps"] == 11


@pytest.fixture
def interrupts_are_heard():
    """nohup and a shell's background ignore interrupts, which a run respects."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts_are_heard")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_saves_and_stops(number, folder, tmp_path, monkeypatch):
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    taken = []

    def killed(*arguments, **options):
        taken.append(1)
        if len(taken) == 2:
            signal.raise_signal(number)
        return compute_gradients(*arguments, **options)

    monkeypatch.setattr(steps, "compute_gradients", killed)
    result = call("train", data=folder, out=tmp_path, seeds="0,1", **OPTIONS)
    assert result.exit_code == 0, result.output
    assert "Paused at step 2" in result.output
    assert f"python -m experiments.lra train --resume --out {tmp_path}\n" in result.output
    assert [path.name for path in tmp_path.glob("seed*/checkpoint-*")] == ["checkpoint-00000002"]
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
    monkeypatch.undo()
    result = call("train", "--resume", out=tmp_path, steps=3)
    assert "goes on after step 2" in result.output


@pytest.mark.usefixtures("interrupts_are_heard")
def test_a_second_interrupt_stops_at_once(capfd):
    with pytest.raises(KeyboardInterrupt), stop_caught() as received:
        assert not received()
        signal.raise_signal(signal.SIGINT)
        assert received()
        assert "Ctrl-C again" in capfd.readouterr().err
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_interrupt_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_caught() as received:
            signal.raise_signal(signal.SIGINT)
            assert not received()
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_are_left_alone_in_other_threads():
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: stop_caught().__enter__()()).result() is False
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


def test_resuming_without_a_checkpoint_says_that_it_begins_again(folder, tmp_path, monkeypatch):
    def killed(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "compute_gradients", killed)
    call("train", data=folder, out=tmp_path, **OPTIONS)
    monkeypatch.undo()
    result = call("train", "--resume", out=tmp_path)
    assert result.exit_code == 0, result.output
    assert "begins again: there was no checkpoint" in result.output


def test_several_seeds_are_trained_one_after_the_other(folder, tmp_path):
    result = call("train", data=folder, out=tmp_path / "runs", seeds="3,1", **{**OPTIONS, "steps": 3})
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "runs" / "summary.json").read_text())
    assert [run["seed"] for run in summary["runs"]] == [3, 1]
    found = [json.loads((tmp_path / "runs" / f"seed{seed}" / "metrics.json").read_text()) for seed in (3, 1)]
    first, second = (metrics["test_accuracy"] for metrics in found)
    assert [run["test_accuracy"] for run in summary["runs"]] == [first, second]
    assert summary["test_accuracy_mean"] == pytest.approx((first + second) / 2)
    assert summary["test_accuracy_std"] == pytest.approx(abs(first - second) / 2**0.5)
    spread = rf"{summary['test_accuracy_mean']:.3f} ± {summary['test_accuracy_std']:.3f}"
    shown = re.sub(r"[│┃ ]+", " ", result.output)
    for words in ("seed 3", "seed 1", f"mean ± std {spread}", "majority class 0.", "root operator 0."):
        assert words in shown
    assert call("train", data=folder, out=tmp_path / "alone", **{**OPTIONS, "steps": 3}, seed=1).exit_code == 0
    alone = json.loads((tmp_path / "alone" / "metrics.json").read_text())
    assert alone["test_loss"] == found[1]["test_loss"]


def test_several_seeds_are_resumed_where_they_stopped(folder, tmp_path):
    settings = {**OPTIONS, "steps": 3}
    result = call("train", data=folder, out=tmp_path, seeds="0,1", pause_after=0, **settings)
    assert result.exit_code == 0, result.output
    assert "Paused at step 1" in result.output and f"train --resume --out {tmp_path}" in result.output.replace("\n", "")
    assert not (tmp_path / "seed1").exists()
    result = call("train", "--resume", out=tmp_path)
    assert result.exit_code == 0, result.output
    ended = {seed: (tmp_path / f"seed{seed}/metrics.json").stat().st_mtime_ns for seed in (0, 1)}
    result = call("train", "--resume", out=tmp_path, seeds="0,1,2")
    assert result.exit_code == 0, result.output
    assert ended == {seed: (tmp_path / f"seed{seed}/metrics.json").stat().st_mtime_ns for seed in (0, 1)}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [run["seed"] for run in summary["runs"]] == [0, 1, 2]
    result = call("train", "--resume", out=tmp_path, steps=4)
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [run["steps"] for run in summary["runs"]] == [4, 4, 4]
    result = call("train", data=folder, out=tmp_path, seeds="0", **settings)
    assert result.exit_code == 2 and "holds runs; go on by --resume" in result.output


def test_several_seeds_replace_all_runs_of_those_before(folder, tmp_path):
    """The new runs, stopped and resumed, must not take what is left of the old ones."""
    settings = {**OPTIONS, "steps": 2, "data": folder, "out": tmp_path}
    assert call("train", seeds="0,1", **settings).exit_code == 0
    settings |= {"lr": 0.1, "steps": 3}
    assert call("train", "--overwrite", seeds="0,1", pause_after=0, **settings).exit_code == 0
    result = call("train", "--resume", out=tmp_path)
    assert result.exit_code == 0, result.output
    for seed in (0, 1):
        metrics = json.loads((tmp_path / f"seed{seed}/metrics.json").read_text())
        assert (metrics["config"]["lr"], metrics["steps"]) == (0.1, 3)
        log = [json.loads(line) for line in (tmp_path / f"seed{seed}/log.jsonl").read_text().splitlines()]
        assert [record["step"] for record in log if record["kind"] == "test"] == [3]


def test_several_seeds_leave_runs_of_their_names_alone_unasked(folder, tmp_path):
    settings = {**OPTIONS, "steps": 1, "data": folder}
    assert call("train", out=tmp_path / "seed1", seed=1, **settings).exit_code == 0
    result = call("train", out=tmp_path, seeds="0,1", **settings)
    assert result.exit_code == 2 and "seed1 holds a run" in result.output
    assert (tmp_path / "seed1/metrics.json").exists() and not (tmp_path / "seeds.json").exists()


def test_nothing_is_deleted_for_runs_that_cannot_begin(folder, tmp_path):
    settings = {**OPTIONS, "steps": 1, "data": folder, "out": tmp_path}
    assert call("train", seeds="0,1", **settings).exit_code == 0
    for initial, message in ((tmp_path / "nowhere", "there is no file"), (tmp_path / "seed0", "--overwrite deletes")):
        result = call("train", "--overwrite", seeds="0,1", initial=initial, **settings)
        assert result.exit_code == 2 and message in result.output.replace("\n", " ")
        assert all((tmp_path / f"seed{seed}/model.safetensors").exists() for seed in (0, 1))


def test_a_series_is_of_one_set_of_data(folder, tmp_path):
    settings = {**OPTIONS, "steps": 1}
    assert call("train", seeds="0", data=folder, out=tmp_path / "series", **settings).exit_code == 0
    other = generate(replace(DATA, seed=5), tmp_path, workers=1)
    result = call("train", "--resume", seeds="0,1", data=other, out=tmp_path / "series")
    assert result.exit_code == 2 and "a resumed run must see the same data" in result.output


def test_a_run_that_is_replaced_leaves_no_test_of_it(folder, tmp_path):
    settings = {**OPTIONS, "steps": 1, "data": folder, "out": tmp_path}
    assert call("train", **settings).exit_code == 0
    assert call("test", tmp_path, data=folder, device="cpu").exit_code == 0
    assert (tmp_path / "tests").exists()
    assert call("train", "--overwrite", **settings).exit_code == 0
    assert not (tmp_path / "tests").exists()


def test_a_series_holds_no_run_of_other_settings(folder, tmp_path):
    settings = {**OPTIONS, "steps": 2, "data": folder}
    assert call("train", seeds="0", out=tmp_path / "series", **settings).exit_code == 0
    other = {**settings, "seed": 1, "lr": 0.1}
    assert call("train", out=tmp_path / "series/seed1", **other).exit_code == 0
    result = call("train", "--resume", seeds="0,1", out=tmp_path / "series")
    assert result.exit_code == 2 and "a resumed run must keep its settings: --lr was 0.1, got 0.003" in result.output


@pytest.mark.parametrize("words", [[], ["--overwrite"]], ids=["as it is", "overwrite"])
def test_a_single_run_is_not_put_where_a_series_is(folder, tmp_path, words):
    settings = {**OPTIONS, "steps": 1, "data": folder, "out": tmp_path}
    assert call("train", seeds="0", **settings).exit_code == 0
    result = call("train", *words, **settings)
    assert result.exit_code == 2 and "holds runs with several seeds; choose another folder" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--window", "64"], "--window is for --mask local; the mask is butterfly: leave it out"),
        (["--hidden", "0.5"], "--hidden is for --objective denoise; it is classify"),
        (["--difficulty", "easy"], "--difficulty is for Pathfinder; the task is listops"),
        (["--split", "ordered"], "--split is for Pathfinder"),
        (["--train-examples", "8"], "--train-examples says what to generate for ListOps; with --data, or another task"),
        (["--data-seed", "1"], "--data-seed says what to generate"),
    ],
)
def test_a_setting_without_effect_is_refused(folder, tmp_path, words, message):
    result = call("train", *words, data=folder, out=tmp_path / "run")
    assert result.exit_code == 2 and message in result.output
    assert not (tmp_path / "run").exists()


def test_train_generates_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"longer_than": 10, "shorter_than": 60, "train_examples": 40, "val_examples": 5, "test_examples": 5}
    result = call("train", **{**OPTIONS, **sizes, "steps": 1})
    assert result.exit_code == 0, result.output
    assert (tmp_path / "data/lra/listops-generated-10-60-40-5-5-seed0/generator.json").exists()
    run = tmp_path / "runs/lra/listops-butterfly-seed0"
    assert (run / "metrics.json").exists()
    shutil.rmtree(tmp_path / "data")
    result = call("train", "--resume", out=run, steps=2)
    assert result.exit_code == 0, result.output
    assert json.loads((run / "metrics.json").read_text())["steps"] == 2


def test_generate_says_where_and_that_it_generated(tmp_path):
    result = call("generate", out=tmp_path, longer_than=10, shorter_than=40, train=30, val=5, test=5, workers=1)
    assert result.exit_code == 0, result.output
    assert "Generated data (not the released files)" in result.output
    assert (tmp_path / Settings(10, 40, 30, 5, 5).folder_name / "generated_train.tsv").exists()


def test_demo_trains_all_masks_and_compares_them(folder, tmp_path):
    options = {name: value for name, value in {**OPTIONS, **WINDOW}.items() if name != "mask"}
    result = call("train", preset="demo", data=folder, out=tmp_path, **{**options, "steps": 3})
    assert result.exit_code == 0, result.output
    for word in ("dense", "local", "butterfly", "beacons", "majority class", "root operator", "Exact:", "masks.png"):
        assert word in result.output
    assert (tmp_path / "masks.png").exists()
    proposed = [shlex.split(line, comments=True) for line in result.output.partition("What next?")[2].splitlines()]
    trainings = [words[words.index("train") :] for words in proposed if "experiments.lra" in words]
    assert len(trainings) == 2 and all(words[words.index("--out") + 1] == str(tmp_path) for words in trainings)
    assert [masks.build(words[-1], 64, block=32, window=20).q_len for words in trainings] == [64, 64]
    (shown,) = (words[-1] for words in proposed if "sparseflash" in words)
    assert mask_of(shown).q_len == 2048
    outcomes = json.loads((tmp_path / "demo.json").read_text())
    assert [outcome["name"] for outcome in outcomes] == ["dense", "local", "butterfly", "beacons"]
    again = call("train", preset="demo", mask="local", data=folder, out=tmp_path, **{**options, "steps": 2})
    assert again.exit_code == 0, again.output
    assert len(json.loads((tmp_path / "demo.json").read_text())) == 1


def test_a_demo_that_is_stopped_keeps_what_was_done(folder, tmp_path, monkeypatch):
    train_one = demo.train_one

    def stopped_at_the_third(config, *others):
        if config.mask == "butterfly":
            raise KeyboardInterrupt
        return train_one(config, *others)

    monkeypatch.setattr(demo, "train_one", stopped_at_the_third)
    options = {name: value for name, value in {**OPTIONS, **WINDOW}.items() if name != "mask"}
    assert call("train", preset="demo", data=folder, out=tmp_path, **{**options, "steps": 1}).exit_code != 0
    outcomes = json.loads((tmp_path / "demo.json").read_text())
    assert [outcome["name"] for outcome in outcomes] == ["dense", "local"]


def test_demo_fails_where_a_mask_is_not_exact(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.lra.exactness.ALLOWED", 0.01)
    options = {name: value for name, value in OPTIONS.items() if name != "mask"}
    result = call("train", preset="demo", mask="local", data=folder, out=tmp_path, **{**options, "steps": 1})
    assert result.exit_code == 1
    assert "Not exact: local." in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mask", "no_such_module:mask"], "there is no module no_such_module; a Python file ends with .py"),
        (
            ["--preset", "huge"],
            "the preset must be one of lra, flash, nystromformer, modern, rules, best, demo; got 'huge'",
        ),
        (
            ["--task", "chess"],
            "task must be one of listops, text, retrieval",
        ),
        (["--batch", "65"], "at most the number of training examples, 64; got 65"),
        (["--resume"], "there is no run to resume in"),
        (["--resume", "--preset", "lra"], "--resume keeps the run's settings: leave out --preset and --overwrite"),
        (["--preset", "demo", "--pause-after", "1"], "the demo has no --pause-after"),
        (["--preset", "demo", "--seeds", "0,1"], "the demo has no --pause-after or --seeds"),
        (["--seeds", "0,x"], "--seeds must be whole numbers with commas between them, 0,1,2 say; got '0,x'"),
        (["--seeds", "1,1"], "--seeds must be different; got '1,1'"),
        (["--seeds", "0,1", "--seed", "2"], "--seeds stands instead of --seed: leave out one of them"),
    ],
)
def test_mistakes_are_answered_in_one_line(folder, tmp_path, words, message):
    result = call("train", *words, data=folder, out=tmp_path / "run")
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("preset", [[], ["--preset", "demo"]], ids=["run", "demo"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--mask", "butterfyl"],
            "the pattern must be dense, local, butterfly, an expression such as local(n, window=64), or a function as "
            "file.py:function",
        ),
        (["--block", "100"], "block must be one of 16, 32, 64, 128, 256"),
        (["--heads", "3"], "width must be a multiple of heads"),
        (["--device", "tpu"], "the device must be auto, cpu, cuda or cuda:<number>; got 'tpu'"),
    ],
)
def test_mistakes_are_found_before_data_are_generated(tmp_path, monkeypatch, preset, words, message):
    monkeypatch.chdir(tmp_path)
    result = call("train", *preset, *words)
    assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output
    assert not any(tmp_path.iterdir())


def test_missing_data_is_not_replaced_by_generated_data(tmp_path):
    result = call("train", data=tmp_path / "nowhere", out=tmp_path / "run")
    assert result.exit_code == 2
    assert "nowhere does not exist; place basic_train.tsv" in result.output
    result = call("generate", out=tmp_path, longer_than=5, shorter_than=6)
    assert result.exit_code == 2
    assert "strictly between the bounds" in result.output


def test_every_setting_is_an_option_with_help_and_default():
    result = CliRunner().invoke(cli.app, ["train", "--help"], terminal_width=200)
    for name in HELP:
        assert f"--{name.replace('_', '-')}" in result.output
    assert result.output.count("[default:") >= len(HELP)
    shown = " ".join(result.output.replace("│", " ").split())
    assert "Features of each head. [default: (width / heads)]" in shown
    assert "[default: (no limit)]" in shown
    assert shown.count("no limit") == 1


@pytest.mark.parametrize(("preset", "task"), [(preset, task) for preset in PRESETS for task in PRESETS[preset]])
def test_presets_are_valid_and_give_way_to_options(preset, task):
    assert configure(preset, {"task": task}).steps == PRESETS[preset][task]["steps"]
    assert configure(preset, {"task": task, "steps": 7, "mask": "dense"}).steps == 7


def test_a_preset_that_is_not_for_the_task_is_refused():
    with pytest.raises(ValueError, match="the preset demo is for listops; got the task 'text'"):
        configure("demo", {"task": "text"})
    with pytest.raises(
        ValueError, match="must be one of lra, flash, nystromformer, modern, rules, best, demo; got 'b'"
    ):
        configure("b", {})


def test_resumed_runs_keep_their_settings():
    assert resumed(TINY, {"steps": 20, "device": "auto"}).steps == 20
    with pytest.raises(ValueError, match="must keep its settings: --max-tokens was 40, got 41"):
        resumed(TINY, {"max_tokens": 41})
