import json

import pytest
import torch
from typer.testing import CliRunner

from experiments.lra import cli
from experiments.lra.table import check, measure
from experiments.lra.table.accuracy import collect
from experiments.lra.table.check import Yardstick
from experiments.lra.table.measure import Row
from experiments.lra.table.report import Results, compared, mean_speedup, summary
from experiments.lra.table.shapes import FIVE, VARIANTS, full_batch, settings
from experiments.measurements import read
from experiments.training.layers import attention

CPU = torch.device("cpu")
RULES = [
    {"rule": "majority class", "accuracy": 0.17, "loss": 2.2},
    {"rule": "root operator", "accuracy": 0.36, "loss": 1.9},
]


def table(tmp_path, *words):
    command = ["table", "--device", "cpu", "--rounds", "1", "--steps", "1"]
    return CliRunner().invoke(cli.app, [*command, "--out", str(tmp_path / "out"), *words])


def times_in(tmp_path):
    return [Row(**each) for each in json.loads((tmp_path / "out" / "table.json").read_text())["times"]]


def finished_run(
    folder, *, seed=0, accuracy=0.37, task="listops", mask="dense", generated=False, data=None, about=None, **config
):
    config = {"seed": seed, "task": task, "mask": mask, "steps": 5000, "device": "auto", **config}
    metrics = {
        "task": task, "generated_data": generated, "mask": mask, "test_accuracy": accuracy, "test_examples": 2000,
        "baselines": RULES, "steps": 5000, "parameters": 10, "training_seconds": 3600.0, "tokens_per_s": 1e6,
        "device": "a GPU", "config": config, **(about or {}),
    }  # fmt: skip
    if data is not None:
        metrics["data"] = {"origin": data, "hash": data}
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(metrics))


def row(task, variant, batch, *, ms=None, speedup=None, status="ok", reason=""):
    return Row(task, variant, batch, 1024, "bf16", status, ms=ms, speedup=speedup, reason=reason)


def test_the_command_measures_tasks_and_variants(tmp_path):
    tasks = ("listops", "retrieval")
    result = table(tmp_path, "--tasks", ",".join(tasks))
    assert result.exit_code == 0, result.output
    rows = times_in(tmp_path)
    assert [(each.task, each.variant) for each in rows] == [(task, variant) for task in tasks for variant in VARIANTS]
    for each in rows:
        assert each.status == "ok" and each.batch == 2
        assert each.ms > 0 and each.tokens_per_s > 0 and 0 < each.error < 1
        assert each.speedup == 1 or each.variant != "standard"
    run, recorded = read(tmp_path / "out" / "times.jsonl")
    assert "CPU" in run.device and run.command.startswith("python -m experiments.lra")
    found = {each.name: each for each in recorded}
    assert {f"lra/{each.task}/step/{each.variant}" for each in rows} < found.keys()
    assert found["lra/listops/step/dense"].value == rows[2].ms and found["lra/listops/step/dense"].unit == "ms"
    assert {name for name in found if "mean" in name} == {
        f"lra/mean-of-2-tasks/speed/{variant}" for variant in VARIANTS if variant != "standard"
    }
    page = (tmp_path / "out" / "table.md").read_text()
    for words in (
        "device: CPU",
        "a test of the command, and no measurement",
        "sparseflash, butterfly",
        "geometric mean",
    ):
        assert words in page
    assert str(tmp_path) not in page
    assert (tmp_path / "out" / "table.png").read_bytes().startswith(b"\x89PNG")


def test_every_shape_is_the_tasks_own():
    found = {}
    for task in FIVE:
        for variant in ("standard", "sdpa", "dense"):
            config = settings(task, variant, "lra", batch=1)
            batch = full_batch(config, 1)
            assert (batch.lengths == config.shape.max_tokens + config.shape.first).all()
            found[task, variant] = tuple(batch.ids.shape)
    assert found["listops", "standard"] == (1, 2008) and found["listops", "dense"] == (1, 2048)
    assert found["retrieval", "sdpa"] == (2, 4001) and found["retrieval", "dense"] == (2, 4096)
    assert found["image", "standard"] == (1, 1032) and found["image", "sdpa"] == (1, 1025)
    assert {found["pathfinder32", variant] for variant in ("standard", "sdpa", "dense")} == {(1, 1024)}
    assert settings("text", "dense", "lra").batch == 32


def test_what_is_wrong_is_not_timed(tmp_path, monkeypatch):
    right = attention.sdpa_attention
    monkeypatch.setattr(attention, "sdpa_attention", lambda q, k, v, live, p: right(q, k, v, live, p) * 1.01)
    result = table(tmp_path, "--tasks", "image", "--variants", "standard,sdpa")
    assert result.exit_code == 0, result.output
    times = times_in(tmp_path)
    assert [each.status for each in times] == ["ok", "WRONG"]
    assert times[1].ms is None and times[1].error > 1
    monkeypatch.setattr(attention, "block_sparse_attention", lambda q, k, v, mask, p: v)
    result = table(tmp_path, "--tasks", "image", "--variants", "standard,dense")
    assert result.exit_code == 1
    assert "WRONG" in result.output


def test_a_result_that_is_no_number_is_wrong(monkeypatch):
    monkeypatch.setattr(check, "error", lambda found, truth: float("nan"))
    configs = {"dense": settings("image", "dense", "lra", small=True)}
    assert measure.checked(configs, CPU, lambda line: None)["dense"].status == "WRONG"
    monkeypatch.undo()
    assert Yardstick(CPU).error_of(configs["dense"]) < 1


def test_what_does_not_fit_is_a_row_and_then_half_the_batch_is_measured(monkeypatch):
    right = attention.standard_attention

    def needs_memory(q, k, v, live, p):
        if len(q) > 2:
            raise torch.OutOfMemoryError(
                "Out of memory. Tried to allocate 8.00 GiB. GPU 0 has 1 GiB of which 0 is free"
            )
        return right(q, k, v, live, p)

    monkeypatch.setattr(attention, "standard_attention", needs_memory)
    configs = {name: settings("image", name, "lra", small=True, batch=5) for name in ("standard", "dense")}
    rows = measure.measure(configs, CPU, rounds=1, steps=1)
    assert [(each.variant, each.batch, each.status) for each in rows] == [
        ("standard", 5, "out of memory"), ("dense", 5, "ok"), ("standard", 2, "ok"), ("dense", 2, "ok"),
    ]  # fmt: skip
    assert rows[0].reason == "Out of memory. Tried to allocate 8.00 GiB. GPU 0 has 1 GiB"
    assert rows[1].ms is not None and rows[1].speedup is None
    assert compared(rows)["image", "dense"] is rows[3]


def test_a_failure_in_the_middle_is_a_row(monkeypatch):
    calls = []

    def fails_late(q, k, v, live, p):
        calls.append(q)
        if len(calls) > 8:
            raise RuntimeError("lost\nmore")
        return v

    monkeypatch.setattr(attention, "sdpa_attention", fails_late)
    monkeypatch.setattr(Yardstick, "error_of", lambda self, config: 0.5)
    configs = {name: settings("image", name, "lra", small=True) for name in ("standard", "sdpa")}
    standard, sdpa = measure.measure(configs, CPU, rounds=1, steps=5)
    assert (sdpa.status, sdpa.reason, sdpa.ms) == ("FAILED", "RuntimeError: lost", None)
    assert standard.speedup == 1


def test_the_mean_is_geometric_and_says_over_how_many_tasks():
    times = [
        row("listops", "standard", 32, ms=4.0, speedup=1.0), row("listops", "dense", 32, ms=2.0, speedup=2.0),
        row("text", "standard", 32, status="out of memory"), row("text", "dense", 32, ms=1.0),
        row("text", "standard", 16, ms=4.0, speedup=1.0), row("text", "dense", 16, ms=0.5, speedup=8.0),
        row("image", "standard", 8, ms=1.0, speedup=1.0), row("image", "dense", 8, status="FAILED"),
    ]  # fmt: skip
    assert mean_speedup(times, "dense") == (pytest.approx(4.0), 2)
    assert mean_speedup(times, "local") is None
    assert summary(Results(times=times)) == [
        ["", "listops", "text", "image", "geometric mean"],
        ["standard attention", "1.00x", "1.00x", "1.00x", "1.00x (3 tasks)"],
        ["sparseflash, dense", "2.00x", "8.00x", "FAILED", "4.00x (2 tasks)"],
    ]


def test_runs_of_one_setting_are_one_row(tmp_path):
    for seed, accuracy in ((0, 0.36), (1, 0.38)):
        finished_run(tmp_path / f"a/seed{seed}", seed=seed, accuracy=accuracy, device=f"cuda:{seed}")
    finished_run(tmp_path / "b", mask="butterfly")
    finished_run(tmp_path / "c", attention="standard", accuracy=0.35)
    found = collect(tmp_path)
    assert [each.variant for each in found] == ["butterfly", "dense", "standard"]
    butterfly, dense, _ = found
    assert (dense.runs, dense.seeds, dense.mean) == (2, "0 1", pytest.approx(0.37))
    assert dense.std == pytest.approx(0.02 / 2**0.5)
    assert butterfly.std is None
    assert (dense.best_rule, dense.best_rule_accuracy) == ("root operator", 0.36)


def test_a_row_tells_the_validation_of_the_logs(tmp_path):
    for seed, accuracy in ((0, 0.5), (1, 0.7)):
        finished_run(tmp_path / f"series/seed{seed}", seed=seed)
        log = [{"kind": "train", "step": i, "accuracy": 0.9} for i in range(25)]
        log += [{"kind": "val", "step": 10, "accuracy": 0.2}, {"kind": "val", "step": 24, "accuracy": accuracy - 0.1}]
        (tmp_path / f"series/seed{seed}/log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in log))
    finished_run(tmp_path / "alone", mask="local")
    both, alone = collect(tmp_path)
    assert (both.folder, both.validation) == ("series", pytest.approx(0.5))
    assert (alone.folder, alone.validation) == ("alone", None)


def test_a_row_tells_the_chosen_weights_and_their_validation(tmp_path):
    for seed, (step, accuracy) in enumerate(((700, 0.6), (1200, 0.5))):
        chosen = {"tested_step": step, "validation_accuracy": accuracy}
        finished_run(tmp_path / f"best/seed{seed}", seed=seed, keep="best", eval_every=100, about=chosen)
        log = [{"kind": "val", "step": step, "accuracy": accuracy}, {"kind": "val", "step": 5000, "accuracy": 0.2}]
        (tmp_path / f"best/seed{seed}/log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in log))
    finished_run(tmp_path / "last/a", keep="last", eval_every=100)
    finished_run(tmp_path / "other", seed=2, keep="best", eval_every=200, about={"tested_step": 200})
    finished_run(tmp_path / "last/b", seed=1, keep="last", eval_every=200)
    best, last, other = collect(tmp_path)
    assert (best.folder, best.runs, best.validation) == ("best", 2, pytest.approx(0.55))
    assert (last.runs, other.runs) == (2, 1)


def test_runs_from_before_a_setting_count_as_those_that_leave_it_alone(tmp_path):
    finished_run(tmp_path / "before", seed=0)
    finished_run(tmp_path / "after", seed=1, augment="none", buckets=False, compiled=False)
    finished_run(tmp_path / "turned", seed=2, augment="square", positions="rotary2d")
    found = {each.seeds: each.helps for each in collect(tmp_path)}
    assert found == {"0 1": "none", "2": "turned (square)"}


def test_runs_on_other_data_are_other_rows(tmp_path):
    finished_run(tmp_path / "a", seed=0, generated=True, data="seed 1", longer_than=500)
    finished_run(tmp_path / "b", seed=1, generated=True, data="seed 7", longer_than=500)
    finished_run(tmp_path / "c", seed=1, generated=True, data="seed 1", longer_than=20)
    assert sorted(each.seeds for each in collect(tmp_path)) == ["0 1", "1"]


def test_easier_paths_are_another_task(tmp_path):
    """80 % of paths of 6 dashes need no tracing."""
    finished_run(tmp_path / "hard", task="pathfinder32", accuracy=0.7, difficulty="hard")
    finished_run(tmp_path / "easy", task="pathfinder32", accuracy=0.9, difficulty="easy")
    assert {each.task: each.mean for each in collect(tmp_path)} == {"pathfinder32": 0.7, "pathfinder32, easy": 0.9}


def test_a_run_is_not_counted_twice(tmp_path):
    finished_run(tmp_path / "a")
    finished_run(tmp_path / "b")
    with pytest.raises(ValueError, match=r"a and .*b are the same run, with one seed: it must be counted once"):
        collect(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("test_accuracy", "x"), ("baselines", []), ("training_seconds", None), ("initial", 3),
        ("parameters", ...), ("config", 3), ("config", {}), ("validation_accuracy", "x"), ("steps", "x"),
    ],
)  # fmt: skip
def test_the_damaged_result_of_a_run_is_named(tmp_path, name, value):
    finished_run(tmp_path / "right", seed=1)
    finished_run(tmp_path / "wrong")
    path = tmp_path / "wrong" / "metrics.json"
    metrics = json.loads(path.read_text()) | {name: value}
    if value is ...:
        del metrics[name]
    path.write_text(json.dumps(metrics))
    with pytest.raises(ValueError, match=r"wrong.metrics.json must be the result of a run; got \w+Error: "):
        collect(tmp_path)


@pytest.mark.parametrize("record", [{"kind": "val"}, {"kind": "val", "accuracy": "x"}, {"kind": "val", "accuracy": []}])
def test_the_damaged_log_of_a_run_is_named(tmp_path, record):
    finished_run(tmp_path / "a")
    (tmp_path / "a" / "log.jsonl").write_text(json.dumps(record | {"step": 1}) + "\n")
    with pytest.raises(
        ValueError, match=r"^\S*a.log.jsonl must be the log of a run with its accuracies; got \w+Error: "
    ):
        collect(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "listops,chess"], "tasks must be from listops, text, retrieval, image, pathfinder32; got 'chess'"),
        (
            ["--variants", "standard,flash"],
            "variants must be from standard, sdpa, dense, butterfly, local; got 'flash'",
        ),
        (["--variants", "dense"], "variants must include standard, which the others are compared with"),
        (["--preset", "demo"], "preset must be from lra, nystromformer, modern; got 'demo'"),
        (["--rounds", "0"], "rounds must be at least 1; got 0"),
    ],
)
def test_mistakes_are_answered_in_one_line(tmp_path, words, message):
    result = table(tmp_path, *words)
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")


def test_a_limit_of_time_leaves_rows_that_say_so(tmp_path):
    result = table(tmp_path, "--minutes", "-1", "--tasks", "image", "--variants", "standard,dense")
    assert result.exit_code == 0, result.output
    assert {each.reason for each in times_in(tmp_path)} == {"the limit of -1 minutes was reached"}
