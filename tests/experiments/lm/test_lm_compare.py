import csv
import json
import shutil

import pytest
from rich.console import Console
from typer.testing import CliRunner

from experiments import measurements
from experiments.lm import compare, compare_report
from experiments.lm.cases import Case, parsed
from experiments.lm.cli import app
from experiments.lm.show import Finished, read
from experiments.training import run_folder
from tests.experiments.lm.models import TINY, tokens

CASES = ["cpu:64:dense:sdpa,sparseflash", "cpu:64:local|butterfly:sparseflash"]
NAMES = ["cpu-64-dense-sdpa", "cpu-64-dense-sparseflash", "cpu-64-local-or-butterfly-sparseflash"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tokens(tmp_path_factory.mktemp("lm"))


def invoke(store, out, *more, **changes):
    settings = {**TINY, "steps": 4, "validate_every": 1, **changes}
    chosen = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if value is not None]
    words = ["compare", *(f"--case={case}" for case in CASES), f"--data={store.folder}", f"--out={out}", "--commit=abc"]
    words = [word for word in [*words, *chosen, *more] if not word.startswith("--context")]
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    out = tmp_path_factory.mktemp("lm-compare") / "whole"
    done = invoke(store, out)
    assert done.exit_code == 0, done.output
    return out, done.stdout


def test_the_table_has_every_run_at_equal_tokens_and_positions(store, whole):
    out, shown = whole
    found = json.loads((out / "compare.json").read_text())
    assert [each["run"] for each in found["runs"]] == NAMES
    assert found["corpus"]["hash"] == store.about["hash"]
    for each in found["runs"]:
        metrics = json.loads((out / each["run"] / "metrics.json").read_text())
        assert each["val_loss"] == metrics["val_loss"] and each["tokens"] == 4 * 256
        assert list(each["at_tokens"]) == ["256", "512", "768"]
        logged = {record["step"]: record["loss"] for record in read(out / each["run"]).of_kind("val")}
        assert list(each["at_tokens"].values()) == [logged[1], logged[2], logged[3]]
        assert [row[:2] for row in each["by_position"]][-1] == [32, 64]
        assert f"{each['val_loss']:.4f}" in shown
    assert (out / "compare.md").read_text() in shown and (out / "compare.png").stat().st_size > 1000
    with open(out / "losses.csv") as file:
        assert [row["run"] for row in csv.DictReader(file)] == [name for name in NAMES for _ in range(4)]


def test_a_comparison_writes_its_record(store, whole, tmp_path):
    done = invoke(store, whole[0], f"--record={tmp_path / 'cpu.jsonl'}")
    assert done.exit_code == 0, done.output
    run, found = measurements.read(tmp_path / "cpu.jsonl")
    rows = json.loads((whole[0] / "compare.json").read_text())["runs"]
    assert run.commit == "abc" and "--record" not in run.command and "--out" not in run.command
    losses = {each.way: each.value for each in found if each.name.startswith("lm/4-steps/loss/")}
    assert sorted(losses.values()) == sorted(each["val_loss"] for each in rows)
    assert all(each.settings["run_seeds"] == [0] for each in found)


def test_every_row_states_what_its_run_was_given(whole):
    with open(whole[0] / "compare.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == NAMES
    for row in rows:
        assert {"device", "torch", "triton", "python", "date", "command", "val_loss", "tokens", "seconds"} <= row.keys()
        assert (row["commit"], row["seed"], row["context"]) == ("abc", "0", "64")
        assert row["micro_tokens"] == str(TINY["micro_tokens"])
    assert [(row["pattern"], row["attention"]) for row in rows] == [
        ("dense", "sdpa"), ("dense", "sparseflash"), ("local|butterfly", "sparseflash"),
    ]  # fmt: skip
    assert "local\\|butterfly" in (whole[0] / "compare.md").read_text()


def test_an_empty_column_is_explained(whole):
    records = json.loads((whole[0] / "compare.json").read_text())["runs"]
    corpus = {"tokens": {"train": 1000, "val": 100}, "hash": "abc"}
    for loss, explained in ((4.0, False), (None, True)):
        records[0]["at_tokens"] = dict.fromkeys(records[0]["at_tokens"], loss)
        known = [each | {"at_seconds": dict.fromkeys(each["at_seconds"], 4.0)} for each in records[:1]]
        assert ("Empty: a run had not been validated" in compare_report.markdown(known, corpus)) == explained


def test_dense_attention_learns_the_same_by_both_implementations_and_a_sparse_pattern_something_else(whole):
    found = json.loads((whole[0] / "compare.json").read_text())["runs"]
    sdpa, ours, sparse = (each["val_loss"] for each in found)
    assert ours == pytest.approx(sdpa, abs=1e-5)
    assert abs(sparse - sdpa) > 1e-4


def test_a_comparison_that_pauses_goes_on_to_the_same_losses(store, whole, tmp_path):
    out = tmp_path / "paused"
    for _ in range(30):
        done = invoke(store, out, "--pause-after=0")
        assert done.exit_code == 0, done.output
        if "Go on with the same command" not in done.stdout:
            break
        assert not (out / "compare.json").exists()
    losses = [
        [each["val_loss"] for each in json.loads((folder / "compare.json").read_text())["runs"]]
        for folder in (out, whole[0])
    ]
    assert losses[0] == losses[1]


def test_a_complete_comparison_is_not_trained_again_and_other_settings_are_refused(store, whole, monkeypatch):
    path = whole[0] / NAMES[0] / "model.safetensors"
    before, read = path.stat().st_mtime_ns, []
    saved_settings = run_folder.saved_settings
    monkeypatch.setattr(
        run_folder, "saved_settings", lambda path: (read.append(path.parent.name), saved_settings(path))[1]
    )
    assert invoke(store, whole[0]).exit_code == 0
    assert path.stat().st_mtime_ns == before
    assert read == NAMES
    done = invoke(store, whole[0], lr=1e-2)
    assert done.exit_code == 2 and "must hold a run with the settings and the text of this" in done.stderr


def run_of(name, seconds_a_step):
    train = [{"kind": "train", "step": step, "tokens": 10 * step, "seconds": step} for step in (10, 20)]
    val = [
        {"kind": "val", "step": step, "tokens": 999, "seconds": seconds_a_step * step, "loss": 5 - step / 10}
        for step in (10, 20)
    ]
    return Finished(name, train + val, None, [])


def test_a_damaged_environment_is_named(store, whole, tmp_path):
    out = shutil.copytree(whole[0], tmp_path / "damaged")
    (out / NAMES[1] / "environment.json").write_text("{")
    done = invoke(store, out)
    assert done.exit_code == 2 and "environment.json must be the environment of a run; got JSONDecode" in done.stderr


def test_runs_are_compared_at_shares_of_the_shortest_and_losses_lie_between_validations():
    fast, slow = run_of("fast", 1.0), run_of("slow", 4.0)
    assert slow.validations() == [(100, 40.0, 4.0), (200, 80.0, 3.0)]
    assert compare_report.amounts([fast, slow], "seconds") == [5.0, 10.0, 15.0]
    assert compare_report.amounts([fast, slow], "tokens") == [50.0, 100.0, 150.0]
    assert compare_report.loss_at(slow.validations(), "tokens", 150) == 3.5
    assert compare_report.loss_at(slow.validations(), "seconds", 15) is None
    assert compare_report.loss_at(slow.validations(), "seconds", 81) is None


def test_a_run_that_is_not_complete_is_not_compared():
    with pytest.raises(ValueError, match="must be complete; got slow, which has no metrics"):
        compare_report.summary([run_of("slow", 4.0)], [{}])


def test_a_session_that_is_over_does_not_begin_the_next_run(store, tmp_path):
    configs = {name: compare.config_of(Case("cpu", 64, "dense", "sdpa"), {**TINY, "steps": 2}) for name in ("a", "b")}

    def train(pause):
        return compare.train_all(configs, store, tmp_path, pause, {}, Console(quiet=True))

    assert not train(lambda step: step == 0)
    assert (tmp_path / "a" / "metrics.json").is_file() and not (tmp_path / "b").exists()
    assert train(lambda step: step == 0)


def test_the_settings_of_a_case_are_its_own_whatever_else_is_chosen():
    config = compare.config_of(
        Case("124M", 16_384, "local|butterfly", "sdpa"), {"context": 1, "minutes": 3.0, "lr": 1e-3}
    )
    assert (config.context, config.pattern, config.attention, config.minutes) == (
        16_384,
        "local|butterfly",
        "sdpa",
        3.0,
    )
    assert config.depth == 12 and config.lr == 1e-3


def test_rates_are_tuned_for_each_case_and_then_trained_with_several_seeds(store, tmp_path):
    grid = invoke(store, tmp_path / "grid", "--lrs=1e-4,1e-2")
    assert grid.exit_code == 0, grid.output
    runs = json.loads((tmp_path / "grid" / "compare.json").read_text())["runs"]
    assert [each["run"] for each in runs] == [f"{name}-lr{rate}" for name in NAMES for rate in ("0.0001", "0.01")]
    assert "By case and learning rate" in grid.output
    cases = [case for text in CASES for case in parsed(text)]
    tuned = compare.tuned_in(tmp_path / "grid", cases)
    for case in cases:
        of_case = [each for each in runs if (each["pattern"], each["attention"]) == (case.pattern, case.attention)]
        assert tuned[case] == min(of_case, key=lambda each: each["val_loss"])["lr"]
    words = f"--lr-from={tmp_path / 'grid'}", "--seeds=3,4", f"--record={tmp_path / 'r.jsonl'}"
    done = invoke(store, tmp_path / "seeds", *words)
    assert done.exit_code == 0, done.output
    runs = json.loads((tmp_path / "seeds" / "compare.json").read_text())["runs"]
    assert [(each["run"], each["seed"]) for each in runs] == [
        (f"{name}-seed{seed}", seed) for name in NAMES for seed in (3, 4)
    ]
    assert {each["lr"] for each in runs} <= {1e-4, 1e-2}
    losses = [each["val_loss"] for each in runs[:2]]
    assert f"{sum(losses) / 2:.4f} ± {abs(losses[0] - losses[1]) / 2**0.5:.4f}" in done.output
    assert {each.seeds for each in measurements.read(tmp_path / "r.jsonl")[1]} == {2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lrs=1e-4,x"], "--lrs must be different numbers above 0 and below 1, 3e-4,6e-4 say; got '1e-4,x'"),
        (["--lrs=1e-4,1e-4"], "--lrs must be different numbers"),
        (["--lrs=1e-4", "--lr-from=x"], "--lr, --lrs and --lr-from name learning rates: give one of them"),
        (["--lrs=1e-4,1e-3", "--record=x"], "--record keeps one run of each case and seed: choose a rate"),
        (["--seeds=1,1"], "--seeds must be different"),
    ],
)
def test_lists_that_do_not_fit_are_refused(words, message, store, tmp_path):
    done = invoke(store, tmp_path, *words)
    assert done.exit_code == 2 and message in " ".join(done.output.split())


def test_a_case_that_was_not_tuned_is_named(store, whole, tmp_path):
    with pytest.raises(ValueError, match="--lr-from must have runs of every case; it has none of cpu-128-dense-sdpa"):
        case = Case("cpu", 128, "dense", "sdpa")
        compare.configs_of([case], {}, tuned=compare.tuned_in(whole[0], [case]))
