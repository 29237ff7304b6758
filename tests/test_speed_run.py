"""The speed benchmark from the command line to its files, on a CPU, and its clocks."""

import csv
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.speed import timing
from experiments.speed.__main__ import main, parser
from experiments.speed.cases import BACKWARD, CASES, FORWARD
from experiments.speed.patterns import pattern
from experiments.speed.peers import PEERS, ours
from experiments.speed.peers.runner import Unavailable
from experiments.speed.report import FAILED, NOT_RUN, OK, OURS, Row, short_table, write_csv, write_markdown
from experiments.speed.run import Options, make_inputs, run_cases

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny operations on a shared machine: threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_case_runs_on_a_cpu_and_leaves_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--device",
        "cpu",
        "--length",
        "128",
        "--block",
        "16",
        "--check-heads",
        "1",
        "--peers",
        "sdpa",
    ]
    assert main([*arguments, "--out", str(tmp_path), "--commit", "abc123"]) == 0
    with (tmp_path / "speed.csv").open() as file:
        rows = list(csv.DictReader(file))
    ours_rows = [row for row in rows if row["peer"] == OURS]
    assert [row["case"] for row in ours_rows] == [case.name for case in CASES for _ in case.passes]
    assert all(row["status"] == OK and float(row["ms"]) > 0 and float(row["error"]) <= 1 for row in ours_rows)
    timed = [row for row in rows if row["peer"] == "sdpa" and row["status"] == OK]
    assert {row["mask"] for row in timed} == {"dense", "causal"}
    assert all(float(row["ratio"]) > 0 and float(row["difference"]) < 0.03 for row in timed)
    text = (tmp_path / "speed.md").read_text()
    assert str(tmp_path) not in text and "- command: python -m experiments.speed --device cpu" in text
    assert "- commit: abc123" in text and f"- torch: {torch.__version__}" in text
    assert "| d64-butterfly | 50.00% |" in text
    shown = capsys.readouterr().out
    assert f"[{len(CASES)}/{len(CASES)}]" in shown and "longest first backward of ours" in shown.splitlines()[-1]


def test_options_that_cannot_be_served_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--cases", "none-such", "--out", str(tmp_path)]) == 2
    assert "--cases must match" in capsys.readouterr().err
    assert main(["--device", "cpu", "--peers", "xformers", "--out", str(tmp_path)]) == 2
    assert "--peers must be from flex" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["--out", str(tmp_path)]) == 2
        assert "--device cpu" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_no_case_begins_after_the_limit() -> None:
    cases = [case.shrunk(64, 16) for case in CASES[:3]]
    seen: list[int] = []
    rows = run_cases(cases, ours, {}, Options(CPU), minutes=-1, done=lambda rows: seen.append(len(rows)))
    assert [row.status for row in rows] == [NOT_RUN] * 4
    assert seen == [1, 2, 4]
    assert "d128-dense, ours backward: not run: the limit of -1 minutes was reached" in short_table(rows)


def test_a_case_that_breaks_the_benchmark_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    good = CASES[0].shrunk(64, 16)
    options = Options(CPU, rounds=1, calls=1, heads=1)
    rows = run_cases([replace(good, kind="spiral"), good], ours, {}, options, minutes=1)
    assert [row.status for row in rows] == [FAILED, OK]
    assert "kind must be one of" in rows[0].reason and "spiral" in capsys.readouterr().err


def test_tables_show_ratios_and_reasons(tmp_path: Path) -> None:
    case = CASES[2]
    rows = [
        Row(case, OURS, FORWARD, OK, density=1.0, ms=2.0, tflops=500.0, error=0.25, first_call_s=1.5),
        Row(case, "flex", FORWARD, OK, ms=3.0, ratio=1.5),
        Row(case, OURS, BACKWARD, OK, density=1.0, ms=5.0, tflops=400.0, error=0.5),
        Row(case, "flex", BACKWARD, FAILED, reason="RuntimeError: no"),
        Row(case, "absent", FORWARD, "skipped", reason="not installed"),
    ]
    lines = short_table(rows).splitlines()
    assert re.split(" {2,}", lines[0]) == [
        "case",
        "density",
        "error",
        "ours forward",
        "ours backward",
        "flex f",
        "flex b",
    ]
    assert re.split(" {2,}", lines[1]) == [
        "d128-dense",
        "100.00%",
        "0.50",
        "2.000 (500)",
        "5.000 (400)",
        "1.50",
        "FAILED",
    ]
    assert "d128-dense, flex backward: FAILED: RuntimeError: no" in lines
    assert "longest first forward of ours, compilation included: 1.50 s (d128-dense)" in lines
    write_csv(rows, tmp_path / "speed.csv")
    write_markdown(rows, {"device": "a card"}, tmp_path / "speed.md")
    assert (tmp_path / "speed.csv").read_text().count("\n") == 6
    assert (
        "| d128-dense | 100.00% | 0.50 | 2.000 (500) | 5.000 (400) | 1.50 | FAILED |"
        in (tmp_path / "speed.md").read_text()
    )


def test_turns_alternate_and_the_median_is_of_all_rounds() -> None:
    order: list[str] = []
    calls = {
        name: timing.Timed(lambda name=name: order.append(name), nullcontext)  # type: ignore[misc]
        for name in ("a", "b")
    }
    found = timing.in_turns(calls, CPU, rounds=2, round_ms=0.0)
    runs = [name for number, name in enumerate(order) if number == 0 or order[number - 1] != name]
    assert runs == ["a", "b", "a", "b"]
    assert len(found["a"].rounds) == 2 and found["a"].ms >= 0 and found["b"].failure is None


def test_single_calls_are_counted() -> None:
    calls: list[int] = []
    timed = {"a": timing.Timed(lambda: calls.append(0), nullcontext)}
    found = timing.of_single_calls(timed, CPU, rounds=2, count=5)
    assert len(calls) == 2 * (3 + 5) and found["a"].ms < 1


def test_gpu_peers_refuse_a_cpu_with_a_reason() -> None:
    case = CASES[0].shrunk(64, 16)
    inputs = make_inputs(case, Options(CPU))
    for name in ("flex", "flex-autotune", "sdpa-fa2", "sdpa-cudnn"):
        with pytest.raises(Unavailable, match="needs a CUDA device"):
            PEERS[name](case, pattern("dense", 64, 16), inputs)


def test_the_help_shows_each_command_on_a_line_of_its_own():
    lines = [line for line in parser().format_help().splitlines() if line.startswith("python -m experiments.speed")]
    assert len(lines) == 4
