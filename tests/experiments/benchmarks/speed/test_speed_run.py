import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from experiments.benchmarks import timing
from experiments.benchmarks.harness import Bench, Unavailable, deadline
from experiments.benchmarks.speed.__main__ import app
from experiments.benchmarks.speed.cases import CASES, GROUPS, Case
from experiments.benchmarks.speed.patterns import pattern
from experiments.benchmarks.speed.peers import PEERS, ours
from experiments.benchmarks.speed.peers.flashattention4 import load
from experiments.benchmarks.speed.precision import products_in_tf32
from experiments.benchmarks.speed.run import OURS, make_inputs, run_all, run_case
from experiments.measurements import Measurement, Run, read
from tests.processes.threads import threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


TINY = ("--device", "cpu", "--length", "128", "--block", "16", "--check-heads", "1")


def run(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)), prog_name="python -m experiments.benchmarks.speed")


def measured(folder: Path) -> list[Measurement]:
    return read(folder / "speed.jsonl")[1]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """256 tokens: the largest error of a shorter fp32 output is luck."""
    folder = tmp_path_factory.mktemp("everything")
    groups = [word for group in GROUPS for word in ("--group", group)]
    tiny = ("--device", "cpu", "--length", "256", "--block", "32", "--check-heads", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "LAUNCHES_A_ROUND", (1, 1))
        result = run(*tiny, "--peers", "sdpa,sparseflash-varlen", *groups, "--out", folder, "--commit", "abc123")
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_every_case_runs_on_a_cpu(everything: tuple[Path, str]) -> None:
    folder, shown = everything
    found = measured(folder)
    cases = CASES
    ours_found = [each for each in found if each.way == OURS]
    assert [each.name for each in ours_found] == [
        f"speed/{case.path}/{direction}/{OURS}" for case in cases for direction in ("exactness", *case.passes)
    ]
    timed = [each for each in ours_found if each.unit in ("ms", "us")]
    assert all(each.value > 0 and each.settings["flops"] > 0 for each in timed)  # type: ignore[operator]
    assert all(each.value <= 1 for each in ours_found if "/exactness/" in each.name)  # type: ignore[operator]
    assert {each.failure for each in ours_found if each.unit == "MiB"} == {
        "skipped: PyTorch counts memory on a CUDA device only"
    }
    of_sdpa = [each for each in found if each.way == "sdpa" and not each.failure]
    assert {each.settings["mask"] for each in of_sdpa} == {"dense", "causal"}
    assert f"[{len(cases)}/{len(cases)}]" in shown


def test_a_run_leaves_its_record_and_shows_its_table(everything: tuple[Path, str]) -> None:
    folder, shown = everything
    run, _ = read(folder / "speed.jsonl")
    assert (run.device, run.commit, run.seed) == ("CPU", "abc123", 0)
    assert run.versions["flash-attn-4"] == "not installed" and run.versions["torch"] == torch.__version__
    assert "| speed/butterfly/64/forward |" in shown and "skipped: dense and causal masks only" in shown


def test_groups_are_listed_and_chosen(tmp_path: Path) -> None:
    listed = run("--list").output
    for group, question in GROUPS.items():
        assert f"{group}: {question}\n" in listed
    result = run(*TINY, "--group", "windows", "--group", "dtypes,memory", "--peers", "none", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert {each.name.split("/")[1].partition("-")[0] for each in measured(tmp_path)} == {
        "window256", "window64", "fp32", "tf32", "fp16", "bf16", "memory"
    }  # fmt: skip


def test_options_that_cannot_be_served_say_so(tmp_path: Path) -> None:
    for words, message in (
        (("--device", "cpu", "--cases", "none-such"), "--cases must match"),
        (("--device", "cpu", "--group", "fast"), "--group must be from"),
        (("--device", "cpu", "--peers", "xformers"), "--peers must be from flex"),
        (("--device", "cpu", "--block", "100"), "--block must be from 16, 32, 64, 128, 256; got 100."),
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
    exactness, *others = measured(tmp_path)
    assert exactness.value > 1 and {each.way for each in others} == {OURS, "sdpa", "reference"}  # type: ignore[operator]
    assert all(each.failure.startswith("ValueError: an error of ours is") for each in others)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench("speed", Run("CPU", "", {}, "", "", ""), tmp_path, CPU, rounds=1)


def test_no_case_begins_after_the_limit(bench: Bench) -> None:
    assert run_all(bench, {"a": lambda: False, "b": lambda: False}, deadline(0.0))
    assert [each.failure for each in bench.measurements] == ["not run: out of time"] * 2


def test_a_case_that_breaks_the_benchmark_does_not_end_the_run(bench: Bench) -> None:
    good = CASES[0].shrunk(64, 16)
    cases = {"bad": replace(good, kind="spiral"), good.path: good}
    todo = {path: lambda case=case: run_case(bench, case, [], 0, 1) for path, case in cases.items()}  # type: ignore[misc]
    assert not run_all(bench, todo, deadline(None))
    bad, exactness, *passes = bench.measurements
    assert "kind must be one of" in bad.failure and exactness.value <= 1  # type: ignore[operator]
    assert len(passes) == len(good.passes) and all(each.value > 0 for each in passes)  # type: ignore[operator]


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
    case = CASES[0].shrunk(64, 16)
    inputs = make_inputs(case, CPU)
    for name in ("flex", "flex-autotune", "fa4", "fa4-deterministic", "sdpa-fa2", "sdpa-cudnn"):
        with pytest.raises(Unavailable, match="needs a CUDA device"):
            PEERS[name](case, pattern(case), inputs)


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
