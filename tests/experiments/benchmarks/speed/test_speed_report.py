"""What the report computes and draws, from made-up rows."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from experiments.benchmarks.speed import derived, plots, report, tables
from experiments.benchmarks.speed.cases import BACKWARD, BOTH, CALL, CASES, FIRST, FORWARD, MEMORY, WAYS, Case
from experiments.benchmarks.speed.cli import app
from experiments.benchmarks.speed.frame import newest, read
from experiments.benchmarks.speed.memory import MIB, floor_mib
from experiments.benchmarks.speed.rows import FAILED, NOT_RUN, OK, OURS, SKIPPED, Row, write_csv
from experiments.training.environment import FACTS

BY_NAME = {case.name: case for case in CASES}
DENSITY = {"dense": 1.0, "butterfly": 0.0625, "random12": 0.125, "bigbird": 0.08, "local": 0.07, "causal": 0.5}


def facts(run: str = "2026-01-01", device: str = "a card") -> dict[str, str]:
    return dict.fromkeys(FACTS, "1") | {"run": run, "device": device, "commit": "abc", "command": "the command"}


def row(name: str, peer: str = OURS, direction: str = FORWARD, status: str = OK, **numbers: object) -> Row:
    case = BY_NAME[name]
    made = Row(case, peer, direction, status, density=DENSITY.get(case.kind), **numbers)  # type: ignore[arg-type]
    if made.ms is not None and made.tflops is None:
        made.tflops = 100.0
    return made


def frame(folder: Path, *runs: list[Row], device: str = "a card") -> pd.DataFrame:
    """The rows of runs, the newest last, through their files."""
    paths = []
    for number, rows in enumerate(runs):
        paths.append(folder / f"{number}.csv")
        write_csv(rows, facts(f"2026-01-0{number + 1}", device), paths[-1])
    return read(paths)


def test_efficiency_is_time_over_density_times_dense_time(tmp_path: Path) -> None:
    found = derived.efficiency(frame(tmp_path, [
        row("d64-dense", ms=8.0), row("d64-butterfly", ms=0.75), row("d64-causal", ms=4.4),
        row("d128-butterfly", ms=1.0),  # its dense case is not there: no efficiency
        row("d64-dense", "flex", ms=16.0), row("d64-butterfly", "flex", ms=1.0),
        row("d64-dense", "fa4", FORWARD, FAILED), row("d64-butterfly", "fa4", ms=1.0),
    ]))  # fmt: skip
    values = found.set_index(["case", "peer"])["efficiency"].to_dict()
    assert values == {
        ("d64-butterfly", OURS): pytest.approx(0.75 / (0.0625 * 8.0)), ("d64-butterfly", "flex"): pytest.approx(1.0),
        ("d64-causal", OURS): pytest.approx(1.1),
    }  # fmt: skip


def test_small_blocks_are_compared_by_live_score_with_blocks_of_128(tmp_path: Path) -> None:
    rows = frame(tmp_path, [
        row(f"block{block}-d64-butterfly", direction=way, ms=1.0, tflops=tflops)
        for way, all_tflops in ((FORWARD, (400, 340, 250, 120)), (BACKWARD, (300, 270, 180, 150)))
        for block, tflops in zip((128, 64, 32, 16), all_tflops)
    ])  # fmt: skip
    found = derived.per_live_score(rows).set_index(["direction", "block"])
    assert found["speed"].to_dict() == {
        (FORWARD, 64): 0.85, (FORWARD, 32): 0.625, (FORWARD, 16): 0.3,
        (BACKWARD, 64): 0.9, (BACKWARD, 32): 0.6, (BACKWARD, 16): 0.5,
    }  # fmt: skip
    assert found.loc[FORWARD]["target"].to_dict() == {64: 0.85, 32: 0.6, 16: 0.4}
    lines = tables.blocks(rows)
    assert lines is not None
    assert [line[2:] for line in lines[1:]] == [
        ["64", "0.85", "0.90", "0.85", "met"], ["32", "0.62", "0.60", "0.60", "met"],
        ["16", "0.30", "0.50", "0.40", "missed"],
    ]  # fmt: skip


def test_the_best_peer_is_the_fastest_rival_of_the_same_pass(tmp_path: Path) -> None:
    rows = frame(tmp_path, [
        row("d64-dense", ms=2.0), row("d64-dense", "flex", ms=3.0), row("d64-dense", "fa4", ms=1.5),
        row("d64-dense", "reference", ms=0.1), row("d64-dense", "sdpa-fa2", FORWARD, "DIFFERS"),
        row("d64-dense", direction=BACKWARD, ms=5.0), row("d64-dense", "flex", BACKWARD, ms=6.0),
    ])  # fmt: skip
    found = derived.best_peers(rows).set_index("direction")
    assert (found.loc[FORWARD, "best_peer"], found.loc[FORWARD, "best_ratio"]) == ("fa4", 0.75)
    assert (found.loc[BACKWARD, "best_peer"], found.loc[BACKWARD, "best_ratio"]) == ("flex", 1.2)
    table = tables.best(rows)
    assert table is not None
    assert table[1] == [
        "d64-dense", "1x32x16kx64 bf16", "100.00%", "-", "2.000 (100)", "5.000 (100)", "0.75 fa4", "1.20 flex"
    ]  # fmt: skip


def test_memory_is_compared_with_the_tensors_and_over_lengths(tmp_path: Path) -> None:
    floor = 4 * 16 * 16384 * 64 * 2 / MIB
    assert floor_mib(1, 8, 8, 16384, 64, "bfloat16") == floor
    assert floor_mib(1, 8, 2, 16384, 64, "tf32") == 2 * floor * 10 / 16
    rows = frame(tmp_path, [
        row(f"memory-{name}-local", peer, MEMORY, memory_mib=times * more * floor)
        for peer, growing in ((OURS, 1.0), ("flex", 1.2))
        for name, times, more in (("16k", 1, 1.5), ("64k", 4, 1.5), ("1m", 64, 1.5 * growing))
    ])  # fmt: skip
    found = derived.memory(rows).set_index(["peer", "length"])
    assert found.loc[(OURS, 2**20), "floor"] == pytest.approx(1.5)
    assert found.loc[(OURS, 2**20), "growth"] == pytest.approx(1.0)
    assert found.loc[("flex", 2**20), "growth"] == pytest.approx(1.2)
    table = tables.memory(rows)
    assert table is not None
    assert table[-1] == ["local, shortest to longest", "", "linear (x1.00 a token)", "not linear (x1.20 a token)"]


def test_calls_and_first_calls_are_told(tmp_path: Path) -> None:
    rows = frame(tmp_path, [
        row("call-dense", direction=CALL, ms=0.03), row("call-dense", "sdpa", CALL, ms=0.012),
        row("first-d64", direction=FIRST[0], ms=2500.0, first_call_s=2.5),
        row("first-d64", direction=FIRST[1], ms=3500.0, first_call_s=3.5),
        row("first-d64", "flex", FIRST[0], ms=11000.0, first_call_s=11.0),
    ])  # fmt: skip
    calls, first = tables.calls(rows), tables.first_calls(rows)
    assert calls == [["microseconds a call", "tokens", OURS, "sdpa"], ["call-dense", "256", "30.0", "12.0"]]
    assert first == [
        ["first call, seconds (target 3)", "call", OURS, "flex"],
        ["first-d64", "inference", "2.50 met", "11.00"],
        ["first-d64", "then forward + backward", "3.50 missed", "-"],
    ]


def test_of_several_runs_a_case_is_of_the_newest_that_got_to_it(tmp_path: Path) -> None:
    rows = frame(
        tmp_path,
        [row("d64-dense", ms=8.0), row("d64-dense", "flex", ms=9.0), row("d64-butterfly", ms=0.5)],
        [row("d64-butterfly", ms=0.4), row("d64-dense", direction=FORWARD, status=NOT_RUN, reason="late")],
    )
    shown = newest(rows)
    assert shown.groupby("case")["run"].unique().map(list).to_dict() == {
        "d64-butterfly": ["2026-01-02"], "d64-dense": ["2026-01-01"]
    }  # fmt: skip
    # The newer butterfly has no dense case in its own run: what it is compared with is the older pair.
    (efficiency,) = derived.efficiency(rows)["efficiency"]
    assert efficiency == pytest.approx(0.5 / (0.0625 * 8.0))


def test_nothing_is_compared_across_runs_or_devices(tmp_path: Path) -> None:
    apart = frame(
        tmp_path, [row("d64-dense", ms=8.0)], [row("d64-butterfly", ms=0.4), row("d64-dense", "flex", ms=1.0)]
    )
    assert derived.efficiency(apart).empty and derived.best_peers(apart).empty
    other = pd.concat([apart, frame(tmp_path, [row("d64-dense", ms=1.0)], device="another card")])
    assert len(newest(other[other["peer"] == OURS])) == 3


def everything() -> list[Row]:
    """Every case as if it had been measured."""
    rows = []
    for case in CASES:
        for peer, slower in ((OURS, 1.0), ("flex", 1.3), ("fa4", 0.9)):
            for way in case.passes:
                if case.block < 128 and peer != OURS:
                    rows.append(Row(case, peer, way, SKIPPED, 0.1, reason="blocks of 128 only"))
                    continue
                made = Row(case, peer, way, OK, DENSITY.get(case.kind, 0.1), checked="3 of 16 heads in full")
                if way == MEMORY:
                    made.memory_mib = slower * case.length / 100
                else:
                    made.ms = slower * (made.density or 1.0) * math.sqrt(case.length) / 10
                    made.tflops, made.first_call_s = 300 / slower, 2.0
                rows.append(made)
    return rows


def texts(figure: Figure) -> str:
    """All that is written in a figure."""
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_the_pictures_are_labelled(tmp_path: Path) -> None:
    rows = frame(tmp_path, everything())
    expected = {
        "density": (
            "Time over density", "live scores, %", "milliseconds", "ideal: density x our dense time", "butterfly",
            "forward, D=64, 16384 tokens, 32 heads, bfloat16", "backward, D=128",
        ),
        "lengths": (
            "Speed over length", "tokens", "useful TFLOP/s", "512", "1M", "local, forward, D=64", "dense, backward",
        ),
        "memory": (
            "Peak memory of forward and backward", "GiB", "tokens", "q, k, v, output and gradients alone",
            "butterfly, D=64",
        ),
    }  # fmt: skip
    for name, draw in plots.PICTURES.items():
        figure = draw(rows, "a card, torch 2")
        assert figure is not None
        written = texts(figure)
        for text in ("a card, torch 2", OURS, "flex", "fa4", *expected[name]):
            assert text in written, f"{text!r} is not written in the picture of {name}"


def test_the_ideal_line_is_density_times_the_dense_time(tmp_path: Path) -> None:
    rows = frame(tmp_path, [row("d64-dense", ms=8.0), row("d64-butterfly", ms=0.75)])
    figure = plots.density(rows, "a card")
    assert figure is not None
    ideal = next(line for line in figure.axes[0].lines if str(line.get_label()).startswith("ideal"))
    assert list(ideal.get_xdata()) == [6.25, 100] and list(ideal.get_ydata()) == [0.5, 8.0]


def test_without_rows_there_is_no_picture(tmp_path: Path) -> None:
    rows = frame(tmp_path, [row("call-dense", direction=CALL, ms=1.0)])
    assert plots.save(rows, "a card", tmp_path) == {}


def test_the_report_has_every_finding_and_every_reason(tmp_path: Path) -> None:
    rows = frame(tmp_path, everything())
    files = report.save(rows, tmp_path / "out")
    assert [path.name for path in files] == ["speed.md", "density.png", "lengths.png", "memory.png"]
    text = (tmp_path / "out" / "speed.md").read_text()
    for part in (
        "# Speed on a card", "- command: the command", "](density.png)", "## Efficiency", "## Small mask blocks",
        "## Call overhead", "## First call", "## Peak memory", "## masks: All masks", "## dims:", "## tuned:",
        "fa4 (12 cases from block64-d64-butterfly to block16-d128-random12; forward, backward, both): skipped: blocks",
        "3 of 16 heads in full (114 cases)",
    ):  # fmt: skip
        assert part in text, part
    shown = report.text(rows)
    assert shown.index("best peer f") < shown.index("Efficiency") < shown.index("Peak memory")
    widths = [len(line) for line in shown.splitlines() if re.match(r"(d64|n512|lra1k)-", line)]
    assert widths and max(widths) < 200


def test_several_files_become_one_report(tmp_path: Path) -> None:
    paths = []
    for number, (device, group) in enumerate((("a card", "masks"), ("a card", "memory"), ("B 200", "masks"))):
        paths.append(str(tmp_path / f"{number}.csv"))
        write_csv(
            [one for one in everything() if one.case.group == group],
            facts(f"2026-01-0{number}", device),
            Path(paths[-1]),
        )
    result = CliRunner().invoke(app, ["report", *paths, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "all.csv", "speed-a-card.md", "speed-b-200.md", "density-a-card.png", "memory-a-card.png", "density-b-200.png"
    }  # fmt: skip
    again = read([tmp_path / "out" / "all.csv"])
    assert len(again) == sum(len(read([Path(path)])) for path in paths)
    assert set(again["run"]) == {"2026-01-00", "2026-01-01", "2026-01-02"}


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("case,ms\na,1\n")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "old.csv"), "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "old.csv must have the columns of speed.csv; it lacks" in re.sub(r"[\s│]+", " ", result.output)


def test_the_same_file_twice_counts_once(tmp_path: Path) -> None:
    write_csv([row("d64-dense", ms=8.0)], facts(), tmp_path / "a.csv")
    assert len(read([tmp_path / "a.csv", tmp_path / "a.csv"])) == 1


def test_ways_have_short_names_and_cases_all_have_shapes(tmp_path: Path) -> None:
    assert set(tables.SHORT) == set(WAYS) and BOTH in WAYS
    case: Case = BY_NAME["kv8of32-d64-causal"]
    table = tables.best(frame(tmp_path, [Row(case, OURS, FORWARD, OK, 0.5, 1.0, tflops=1.0)]))
    assert table is not None and table[1][1] == "1x32/8x16kx64 bf16"
