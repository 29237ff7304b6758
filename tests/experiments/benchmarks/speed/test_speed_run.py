"""The speed benchmark from the command line to its files, on a CPU, and its clocks."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from experiments.benchmarks import timing
from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed import first_call
from experiments.benchmarks.speed.__main__ import app
from experiments.benchmarks.speed.cases import CASES, FIRST, GROUPS, Case
from experiments.benchmarks.speed.inputs import Options, make_inputs
from experiments.benchmarks.speed.patterns import pattern
from experiments.benchmarks.speed.peers import PEERS, ours
from experiments.benchmarks.speed.peers.flashattention4 import load
from experiments.benchmarks.speed.precision import products_in_tf32
from experiments.benchmarks.speed.rows import FAILED, NOT_RUN, OK, OURS, SKIPPED
from experiments.benchmarks.speed.run import run_case, run_cases
from experiments.measurements import Measurement, read
from tests.processes.threads import threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny operations on a shared machine: threads only wait for one another."""
    with threads(1):
        yield


TINY = ("--device", "cpu", "--length", "128", "--block", "16", "--check-heads", "1")


def run(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)), prog_name="python -m experiments.benchmarks.speed")


def measured(folder: Path) -> list[Measurement]:
    return read(folder / "speed.jsonl")[1]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Every case but those that start processes. Folder and output of the run.

    256 tokens: the largest error of a shorter fp32 output is a matter of luck, for the yardstick as for ours.
    """
    folder = tmp_path_factory.mktemp("everything")
    globs = ",".join(case.name for case in CASES if not set(case.passes) & set(FIRST))
    tiny = ("--device", "cpu", "--length", "256", "--block", "32", "--check-heads", "1")
    result = run(*tiny, "--peers", "sdpa", "--cases", globs, "--out", folder, "--commit", "abc123")
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_every_case_runs_on_a_cpu(everything: tuple[Path, str]) -> None:
    folder, shown = everything
    found = measured(folder)
    cases = [case for case in CASES if not set(case.passes) & set(FIRST)]
    ours_found = [each for each in found if each.way == OURS]
    assert [each.name for each in ours_found] == [
        f"speed/{case.path}/{direction}/{OURS}" for case in cases for direction in case.passes
    ]
    timed = [each for each in ours_found if each.unit != "MiB"]
    assert all(each.value > 0 and each.settings["error"] <= 1 and each.settings["flops"] > 0 for each in timed)  # type: ignore[operator]
    assert {each.failure for each in ours_found if each.unit == "MiB"} == {
        "skipped: PyTorch counts memory on a CUDA device only"
    }
    of_sdpa = [each for each in found if each.way == "sdpa" and not each.failure]
    assert {each.settings["mask"] for each in of_sdpa} == {"dense", "causal"}
    assert all(each.settings["difference"] < 0.03 for each in of_sdpa)
    assert f"[{len(cases)}/{len(cases)}]" in shown


def test_a_run_leaves_its_record_and_shows_its_table(everything: tuple[Path, str]) -> None:
    folder, shown = everything
    run, _ = read(folder / "speed.jsonl")
    assert (run.device, run.commit, run.seed) == ("CPU", "abc123", 0)
    assert run.versions["flash-attn-4"] == "not installed" and run.versions["torch"] == torch.__version__
    assert "| speed/butterfly/64/forward |" in shown and "skipped: dense and causal masks only" in shown
    assert f"speed/butterfly/64/forward/{OURS}: " in shown and "of live x dense" in shown


def test_groups_are_listed_and_chosen(tmp_path: Path) -> None:
    listed = run("--list").output
    for group, question in GROUPS.items():
        assert f"{group}: {question}\n" in listed
    result = run(*TINY, "--group", "windows", "--group", "tuned,memory", "--peers", "none", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert {each.name.split("/")[1].partition("-")[0] for each in measured(tmp_path)} == {
        "window256", "window64", "tuned", "memory"
    }  # fmt: skip


def test_options_that_cannot_be_served_say_so(tmp_path: Path) -> None:
    for words, message in (
        (("--device", "cpu", "--cases", "none-such"), "--cases must match"),
        (("--device", "cpu", "--group", "fast"), "--group must be from"),
        (("--device", "cpu", "--peers", "xformers"), "--peers must be from flex"),
        (("--device", "cpu", "--block", "100"), "--block must be one of 16, 32, 64, 128, 256; got 100."),
        (("--device", "foo"), "got 'foo'"),
    ):
        result = run(*words, "--out", tmp_path)
        assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())
    if not torch.cuda.is_available():
        result = run("--out", tmp_path)
        assert result.exit_code == 2 and "--device cpu" in result.output
    assert not list(tmp_path.iterdir())


def test_a_wrong_result_ends_with_1_and_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.benchmarks.speed import peers

    def wrong(case: Case, live: object, inputs: object) -> object:
        right = ours(case, live, inputs)  # type: ignore[arg-type]
        return replace(right, call=lambda q, k, v: 1.05 * right.call(q, k, v))

    monkeypatch.setattr(peers, "ours", wrong)
    result = run(*TINY, "--cases", "d64-dense", "--out", tmp_path)
    assert result.exit_code == 1, result.output
    found = measured(tmp_path)
    assert {each.way for each in found} == {OURS} and len(found) == 3
    assert all(each.failure.startswith("WRONG: ") and "times the yardstick" in each.failure for each in found)


def test_first_calls_are_those_of_new_processes() -> None:
    case = next(case for case in CASES if case.name == "first-d64").shrunk(64, 16)
    rows = run_case(case, ours, {"sdpa": PEERS["sdpa"]}, Options(CPU, heads=1))
    assert [(row.peer, row.direction, row.status) for row in rows] == [
        *((OURS, way, OK) for way in FIRST), *(("sdpa", way, SKIPPED) for way in FIRST)
    ]  # fmt: skip
    assert all(row.first_call_s is not None and row.error is not None and row.error <= 1 for row in rows[:2])


def test_a_process_that_gives_no_answer_is_reported() -> None:
    case = next(case for case in CASES if case.name == "first-d64").shrunk(64, 16)
    answers = first_call.in_new_process(case, OURS, Options(CPU), limit=0.01)
    assert [(answer.status, answer.reason) for answer in answers] == [(FAILED, "no answer after 0.01 s")] * 2


def test_no_case_begins_after_the_limit() -> None:
    cases = [case.shrunk(64, 16) for case in (CASES[0], CASES[1], CASES[5])]
    seen: list[int] = []
    rows = run_cases(cases, ours, {}, Options(CPU), minutes=-1, done=lambda rows: seen.append(len(rows)))
    assert [row.status for row in rows] == [NOT_RUN] * 5
    assert seen == [1, 1, 3]
    assert {row.reason for row in rows} == {"the limit of -1 minutes was reached"}


def test_a_case_that_breaks_the_benchmark_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    good = CASES[0].shrunk(64, 16)
    options = Options(CPU, rounds=1, calls=1, heads=1)
    rows = run_cases([replace(good, kind="spiral"), good], ours, {}, options, minutes=1)
    assert [row.status for row in rows] == [FAILED, OK]
    assert "kind must be one of" in rows[0].reason and "spiral" in capsys.readouterr().err


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
    assert len(calls) == 2 * (3 + 5) and found["a"].ms >= 0


def test_gpu_peers_refuse_a_cpu_with_a_reason() -> None:
    case = replace(CASES[0].shrunk(64, 16), tuned=True)
    inputs = make_inputs(case, Options(CPU))
    for name in ("flex", "flex-autotune", "fa4", "fa4-deterministic", "sdpa-fa2", "sdpa-cudnn"):
        with pytest.raises(Unavailable, match="needs a CUDA device"):
            PEERS[name](case, pattern("dense", 64, 16), inputs)


def test_flex_is_tuned_where_it_was_asked_for_only() -> None:
    case = CASES[0].shrunk(64, 16)
    with pytest.raises(Unavailable, match="see the group tuned, or give --flex-autotune"):
        PEERS["flex-autotune"](case, pattern("dense", 64, 16), make_inputs(case, Options(CPU)))


def test_fa4_that_is_not_installed_gives_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(Unavailable, match="flash-attn-4 is not installed: "):
        load()


@pytest.mark.parametrize("wanted", [True, False])
def test_tf32_is_on_inside_only(wanted: bool) -> None:
    before = torch.get_float32_matmul_precision()
    with products_in_tf32(wanted):
        assert torch.backends.cuda.matmul.allow_tf32 == wanted
    assert torch.get_float32_matmul_precision() == before
