import json
import re
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from experiments.lra import arena, cli
from experiments.lra.config import as_dict
from experiments.lra.presets import PRESETS
from experiments.lra.session import Session
from experiments.lra.table.accuracy import helps
from experiments.lra.tasks import load
from experiments.lra.train import check
from experiments.measurements import read
from experiments.training.distributed import SINGLE
from experiments.training.trainer import never
from tests.experiments.lra.commands import call
from tests.experiments.lra.tasks.released_files import write_image, write_text

SMALL = {
    "steps": 3, "batch": 4, "width": 16, "heads": 1, "mlp": 16, "depth": 1, "block": 16, "window": 16,
    "max_tokens": 64, "warmup": 1, "log_every": 1, "device": "cpu", "compiled": False, "precision": "fp32",
}  # fmt: skip
OPTIONS = {name: value for name, value in SMALL.items() if name != "compiled"}


@pytest.fixture
def data(tmp_path):
    write_text(tmp_path)
    write_image(tmp_path, "bin")
    return [word for task in ("text", "image") for word in ("--data", f"{task}={tmp_path}")]


def command(data, out, seeds="0,1", **more):
    return call(
        "arena", "--no-compiled", *data, out=out, rows="text,image", masks="dense,local", seeds=seeds, **OPTIONS, **more
    )


def test_every_row_has_one_seed_before_any_has_two():
    rows = arena.rows_of("rules", ["text", "image"], ["dense", "local"], SMALL, arena.Path("out"))
    order = [(place.parent.name, config.seed) for config, place in arena.in_order(rows, (0, 1))]
    assert order[:5] == [
        ("text-dense", 0), ("text-local", 0), ("image-dense", 0), ("image-local", 0), ("text-dense", 1),
    ]  # fmt: skip


def test_rows_differ_in_task_and_mask_alone_and_have_no_help_but_positions():
    for task in PRESETS["rules"]:
        (config,) = {row.config for row in arena.rows_of("rules", [task], ["dense"], {}, arena.Path("out"))}
        assert (config.augment, config.background, config.auxiliary, config.initial) == ("none", "keep", 0.0, None)
        assert config.positions in ("rotary", "rotary2d")
        assert config.keep == "last"


def test_a_later_call_trains_what_is_missing_and_the_table_has_every_seed(data, tmp_path):
    result = command(data, tmp_path / "out", seeds="0")
    assert result.exit_code == 0, result.output
    first = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("metrics.json")}
    assert len(first) == 4
    result = command(data, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "All runs are complete." in result.output
    assert all(path.stat().st_mtime_ns == when for path, when in first.items())
    assert len(list((tmp_path / "out").rglob("metrics.json"))) == 8
    assert not list((tmp_path / "out").rglob("checkpoint-*"))
    (line,) = re.findall(r"\| image \| local \| ([\d.]+) ([\d.]+) \| ([\d.]+) ± ([\d.]+) \|.*", result.output)
    one, two, mean, deviation = map(float, line)
    assert mean == pytest.approx((one + two) / 2, abs=0.11)
    assert deviation == pytest.approx(abs(one - two) / 2**0.5, abs=0.11)
    assert "| rotary2d | none | nothing |" in result.output
    listed = CliRunner().invoke(cli.app, ["record", str(tmp_path / "out")])
    assert line_of(listed.output, "image", "local") == line_of(result.output, "image", "local")
    record = tmp_path / "record.jsonl"
    words = ["record", str(tmp_path / "out"), "--record", str(record), "--commit", "abc"]
    found = CliRunner().invoke(cli.app, words)
    assert found.exit_code == 0 and line_of(found.output, "image", "local") == line_of(result.output, "image", "local")
    run, measurements = read(record)
    assert run.commit == "abc" and "torch" in run.versions
    (image,) = (each for each in measurements if each.name == "lra/image/accuracy/rules-image/local")
    assert [round(each, 1) for each in image.settings["runs"]] == [one, two] and image.seeds == 2
    assert image.value * image.spread == pytest.approx(deviation, abs=0.11)
    assert (image.settings["helps"], image.settings["learned_before"]) == ("none", "nothing")


def line_of(output, task, mask):
    return next(line for line in output.splitlines() if line.startswith(f"| {task} | {mask} |"))


def test_the_best_preset_names_its_helps(tmp_path):
    found = {}
    for task in PRESETS["best"]:
        (row,) = arena.rows_of("best", [task], ["butterfly"], {}, tmp_path)
        check(replace(row.config, device="cpu", compiled=False))
        found[task] = helps(as_dict(row.config))
    assert found["image"] == (
        "mirrored and moved, squares of other images, brightness as a number, convolutions of 3 x 3 pixels, "
        "smoothed labels, averaged weights"
    )
    assert found["text"] == "convolutions of 7 tokens, averaged weights"
    assert found["listops"].startswith("brackets counted, each argument's operator, values of expressions in training")
    assert found["pathfinder32"].startswith("turned (square), pixel labels in training, convolutions of 3 x 3 pixels")


def test_there_is_nothing_to_record_without_runs(tmp_path):
    found = CliRunner().invoke(cli.app, ["record", str(tmp_path), "--record", str(tmp_path / "a"), "--commit", "abc"])
    assert found.exit_code == 2 and "there is no finished run below" in found.output
    assert not (tmp_path / "a").exists()
    found = CliRunner().invoke(cli.app, ["record", str(tmp_path), "--record", str(tmp_path / "a")])
    assert found.exit_code == 2 and "must be given together" in found.output


def test_a_union_of_masks_is_one_row(data, tmp_path):
    result = call(
        "arena", "--no-compiled", *data[:2], out=tmp_path / "out", rows="text", seeds="0",
        masks="dense,local(n, window=8) | butterfly(n)", **{n: v for n, v in OPTIONS.items() if n != "window"},
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    names = {each.name for each in (tmp_path / "out" / "rules").iterdir()}
    assert names == {"text-dense", "text-local-n--window-8----butterfly-n"}
    assert "| text | local(n, window=8) \\| butterfly(n) |" in result.output


def test_a_paused_run_goes_on_where_it_was(data, tmp_path):
    result = command(data, tmp_path / "out", pause_after=0)
    assert result.exit_code == 0, result.output
    assert "Paused: the same command goes on." in result.output
    assert len(list((tmp_path / "out").rglob("checkpoint-*"))) == 1
    result = command(data, tmp_path / "out")
    assert "dense seed 0 goes on after step 1" in result.output
    assert "All runs are complete." in result.output


def test_other_settings_are_refused(data, tmp_path):
    assert command(data, tmp_path / "out", seeds="0").exit_code == 0
    result = command(data, tmp_path / "out", seeds="0", lr=0.5)
    assert result.exit_code == 2
    assert "a resumed run must keep its settings: --lr was 0.001, got 0.5" in result.output


def test_a_run_that_would_not_end_in_the_rest_is_left_to_the_next_session(tmp_path):
    """Each takes 3 of 5 seconds, so one call makes one of them, and leaves no checkpoint."""
    write_text(tmp_path)
    chosen = {**SMALL, "steps": 10**6, "minutes": 3 / 60}
    rows = arena.rows_of("rules", ["text"], ["dense", "local"], chosen, tmp_path / "out")
    session = Session(load("text", tmp_path), False, never, SINGLE, cli.console)
    begun = time.monotonic()
    assert not arena.train_all(rows, (0,), {"text": session}, begun + 5)
    assert time.monotonic() < begun + 5
    assert [path.parent.parent.name for path in tmp_path.rglob("metrics.json")] == ["text-dense"]
    assert not list(tmp_path.rglob("checkpoint-*"))
    assert not (tmp_path / "out" / "rules" / "text-local").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "listops"], "the runs need an end that is equal for all: give --minutes or --steps"),
        (["--rows", "text", "--steps", "1", "--data", "image=x"], "--data image=... must be of one of the rows text"),
        (["--rows", "text", "--steps", "1", "--data", "x"], "--data must be TASK=PATH with one of the tasks listops,"),
        (["--rows", "text", "--steps", "1"], "the task text needs --data"),
        (["--rows", "film", "--steps", "1"], "the preset rules is for listops, text"),
    ],
)
def test_mistakes_are_answered_in_one_line(words, message):
    result = call("arena", *words, device="cpu")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_pretraining_comes_before_each_run_and_stands_in_the_table(data, tmp_path):
    """On the task's own training inputs; the folders of runs without it are others."""
    result = command(data, tmp_path / "out", seeds="1", pretrain=0.01)
    assert result.exit_code == 0, result.output
    assert "All runs are complete." in result.output
    folder = tmp_path / "out" / "rules-pretrained" / "image-local"
    assert {each.name for each in folder.iterdir()} == {"seed1", "seed1-hidden"}
    before, after = (json.loads((folder / name / "metrics.json").read_text()) for name in ("seed1-hidden", "seed1"))
    assert (before["objective"], before["config"]["hidden"]) == ("denoise", 0.5)
    assert after["initial"]["steps"] == before["steps"] and after["initial"]["objective"] == "denoise"
    assert after["data"] == before["data"]
    steps = before["steps"]
    assert re.search(rf"\| image \| local \| .* none \| denoise {steps} \|", result.output)
    both = command(data, tmp_path / "out", seeds="1,2", pretrain=0.01)
    assert both.exit_code == 0, both.output
    (row,) = (text for text in both.output.splitlines() if text.startswith("| image | local |"))
    assert len(row.split(" | ")[2].split()) == 2, "each seed has a self-pretraining of its own; they are one row"
    again = command(data, tmp_path / "out", seeds="1", pretrain=0.01)
    assert "step" not in again.output.partition("| task")[0]
