import os
import re
import sys
import weakref
from contextlib import contextmanager
from importlib import import_module

import pytest
import torch
import typer
from typer.testing import CliRunner

from experiments.benchmarks import __main__ as command
from experiments.benchmarks.__main__ import module_of, names
from experiments.benchmarks.harness import (
    Bench,
    Unavailable,
    Way,
    chosen,
    deadline,
    difference,
    options,
    reason,
    slug,
    table,
)
from experiments.measurements import Measurement, Run, read, write
from tests.processes.forked import python

RUN = Run("H200", "570", {"torch": "2.9"}, "abc", "2026-11-29", "python -m x")
CPU = torch.device("cpu")


@pytest.fixture
def bench(tmp_path):
    return Bench("mine", RUN, tmp_path, CPU, rounds=3)


def refuse():
    raise Unavailable("no such masks")


def test_ways_are_timed_in_turns_inside_their_context(bench):
    order = []

    @contextmanager
    def context():
        order.append("in")
        yield
        order.append("out")

    bench.time(
        "a", {"forward/ours": Way(lambda: order.append(1), context), "forward/peer": Way(lambda: order.append(2))}
    )
    assert order == ["in", 1, "out", 2] * 3
    run, found = read(bench.path)
    assert run == RUN and [(each.name, each.unit) for each in found] == [
        ("mine/a/forward/ours", "ms"), ("mine/a/forward/peer", "ms")
    ]  # fmt: skip
    assert all(each.value > 0 and each.spread >= 0 for each in found)


def test_host_calls_are_timed_in_loops_as_microseconds(bench):
    order = []
    bench.time("a", {"ours": Way(lambda: order.append(1), settings={"tokens": 3})}, host_calls=10)
    assert len(order) == 3 * (10 + 3)
    (found,) = bench.measurements
    assert (found.unit, found.settings) == ("us", {"tokens": 3})


def test_a_peer_that_fails_or_computes_something_else_is_recorded_with_its_reason(bench):
    x = torch.ones(1, 4, 4)
    ways = {
        "sparseflash": Way(lambda: x),
        "close": Way(lambda: 1.0001 * x, like="sparseflash", peer=True),
        "wrong": Way(lambda: 1.5 * x, like="sparseflash", peer=True),
        "broken": Way(lambda: [][0], peer=True),
        "refused": Way(refuse, like="sparseflash", peer=True),
    }
    bench.time("a", ways)
    found = {each.way: each for each in read(bench.path)[1]}
    assert found["sparseflash"].value and found["close"].value
    assert found["wrong"].failure == "ValueError: differs from ours by 0.5, relative"
    assert found["broken"].failure == "IndexError: list index out of range"
    assert found["refused"].failure == "skipped: no such masks"


def test_what_the_failed_call_of_a_peer_held_is_free(bench):
    held = []

    def fails():
        of_the_graph = 2 * torch.ones(2, requires_grad=True)
        held.append(weakref.ref(of_the_graph))
        try:
            raise ValueError("inner")
        except ValueError as cause:
            try:
                raise KeyError("meanwhile")
            except KeyError:
                raise RuntimeError("outer") from cause

    bench.time("a", {"sparseflash": Way(lambda: torch.ones(1)), "peer": Way(fails, like="sparseflash", peer=True)})
    assert [each() for each in held] == [None]


@pytest.mark.parametrize("way", [Way(refuse), Way(lambda: 2 * torch.ones(1, 1), like="peer")])
def test_a_failure_of_ours_ends_the_run(bench, way):
    with pytest.raises((Unavailable, ValueError), match=r"no such masks|differs from ours"):
        bench.time("a", {"peer": Way(lambda: torch.ones(1, 1)), "sparseflash": way})


def test_out_may_be_a_file(tmp_path):
    bench = Bench("mine", RUN, tmp_path / "h200.jsonl", CPU)
    bench.add("a/ours", 1.0, "ms")
    bench.finish()
    assert read(tmp_path / "h200.jsonl")[1] == [Measurement("mine/a/ours", 1.0, None, "ms")]


def figure(name, value, spread=0.0, unit="ms", **settings):
    return Measurement(f"mine/{name}", value, spread, unit, settings)


def test_the_table_has_a_column_for_each_way_with_rates_and_ratios():
    text = table.markdown(
        [
            figure("dense/sparseflash", 2.0, flops=1e12),
            figure("dense/fa4", 2.2, 0.01),
            figure("dense/sdpa", 2.2, 0.2),
            figure("dense/flex", 2.2, None),  # of one turn, whose noise is not known
            Measurement("mine/local/fa4", None, None, "ms", failure="skipped: no windows"),
            figure("local/sparseflash", 3.0, unit="us", bytes=6e3),
            figure("error/sparseflash", 0.5, unit="1"),
        ]
    )
    assert text.splitlines() == [
        "|  | sparseflash | fa4 | sdpa | flex |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| mine/dense | 2 ms (500 TFLOP/s) | 2.2 ms (**x1.10**) | 2.2 ms (x1.10) | 2.2 ms (x1.10) |",
        "| mine/local | 3 us (2 GB/s) | skipped | - | - |",
        "| mine/error | 0.5 | - | - | - |",
        "",
        "- fa4 (mine/local): skipped: no windows",
    ]


def test_the_table_of_many_ways_has_a_row_for_each():
    text = table.markdown([figure(f"dense/way{number}", 1.0) for number in range(9)])
    assert text.splitlines()[2] == "| mine/dense | way0 | 1 ms |"


def test_the_table_refuses_to_compare_two_runs(tmp_path):
    write(tmp_path / "a.jsonl", RUN, [figure("dense/fa4", 2.2)])
    with pytest.raises(ValueError, match="a ratio must be of one run"):
        table.markdown([*read(tmp_path / "a.jsonl")[1], figure("dense/sparseflash", 2.0)])


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Unavailable("half only"), "skipped: half only"),
        (torch.OutOfMemoryError("tried to allocate"), "out of memory"),
        (RuntimeError("\nin /home/me/x.py\nmore"), "RuntimeError: in x.py"),
    ],
)
def test_reasons_are_a_line_without_local_folders(failure, expected):
    assert reason(failure) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_refused_gpu_leaves_the_interpreter_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(typer.BadParameter, match="there is no CUDA device; --device cpu"):
        Bench.start("mine", "cuda", None, tmp_path)
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_small_tools():
    assert slug("Packed documents, 4,096 keys + sinks") == "packed-documents-4096-keys-+-sinks"
    assert chosen("--case", None, ["a", "b"]) == ["a", "b"] and chosen("--case", ["b"], "ab") == ["b"]
    with pytest.raises(typer.BadParameter, match="--case must be from a, b; got c"):
        chosen("--case", ["c"], ["a", "b"])
    assert difference(torch.full((2, 2), 1.5), torch.ones(2, 2)) == pytest.approx(0.5)


def test_nothing_begins_that_may_end_after_the_minutes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(options.time, "monotonic", lambda: now[0])
    late, never = deadline(1.0), deadline(None)
    found = []
    for now[0] in (0.0, 25.0, 34.0, 36.0, 61.0):  # the longest work took 25 seconds
        found.append(late())
    assert found == [False, False, False, True, True] and not never()


def test_a_folder_that_is_left_of_a_benchmark_is_no_program(monkeypatch, tmp_path):
    """Git leaves the compiled files of a folder that has become a module."""
    (tmp_path / "scores" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    assert module_of("scores") == "experiments.benchmarks.scores"


def test_one_command_runs_every_benchmark_and_shows_records(tmp_path):
    assert {"calls", "speed", "scores", "decode"} <= set(names())
    assert all(typer.main.get_command(import_module(module_of(name)).app) for name in names())
    write(tmp_path / "a.jsonl", RUN, [figure("dense/fa4", 2.2)])
    program = "-m", "experiments.benchmarks"
    shown = python(*program, "show", tmp_path / "a.jsonl")
    assert "H200, driver 570, torch 2.9; abc, 2026-11-29; python -m x" in shown.stdout
    assert "| mine/dense | 2.2 ms |" in shown.stdout
    helped = python(*program, "calls", "--help")
    assert "python -m experiments.benchmarks calls" in helped.stdout
    listed = python(*program, "--help")
    assert "calls, compile, decode" in listed.stdout
    refused = python(*program, "clals")
    assert refused.returncode == 1 and "the benchmark must be from calls, compile" in refused.stderr


@pytest.mark.parametrize("name", names())
def test_help_names_and_explains_every_option(name):
    app = import_module(module_of(name)).app

    def check(command, path):
        shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}).stdout
        for each in command.params:
            if each.param_type_name == "option" and not each.hidden:
                assert each.help, each.name
                assert all(option in shown for option in (*each.opts, *each.secondary_opts))
        for part, of_part in getattr(command, "commands", {}).items():
            if not of_part.hidden:
                assert of_part.help, part
                check(of_part, [*path, part])

    check(typer.main.get_command(app), [])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "show needs the .jsonl file of a run"),
        (["missing.jsonl"], "show must be given .jsonl files of runs; got missing.jsonl: "),
        (["other.jsonl"], "show must be given .jsonl files of runs; got other.jsonl: the first line of other.jsonl"),
    ],
)
def test_show_refuses_what_is_no_run(given, said, monkeypatch, tmp_path):
    (tmp_path / "other.jsonl").write_text('{"name": "a"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "show", *given])
    with pytest.raises(SystemExit, match=re.escape(said)):
        command.main()
