import json
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from experiments.benchmarks.patterns import __main__ as cli
from experiments.benchmarks.patterns import flex, measure, table
from experiments.benchmarks.patterns.catalogue import PATTERNS, Pattern
from experiments.benchmarks.patterns.flex import Peer
from experiments.benchmarks.patterns.measure import Row
from sparseflash import BlockMask, masks

ROW = Row(
    "local", "windows", "|q - k| <= 4", density=0.0123456, tiles=1234.0, at=16_384, layers=7, tokens=1 << 20,
    seconds=0.0213, megabytes=0.3456, eager=Peer(8192, 4.26, 1653.0, "time"),
)  # fmt: skip


@pytest.fixture
def no_analysis(monkeypatch):
    monkeypatch.setattr(measure, "layers", lambda pattern, tokens, block: 5)


# ---------------------------------------------------------------------- measuring


def test_a_pattern_is_counted_at_one_length_and_built_at_another(no_analysis):
    built = []

    def build(tokens, block):
        built.append(tokens)
        return masks.local(tokens, window=30, block=block)

    row = measure.measure(Pattern("near", "windows", "near", build), tokens=640, at=320, block=32, repeats=3)
    small, large = masks.local(320, window=30, block=32), masks.local(640, window=30, block=32)
    assert (row.density, row.tiles, row.at, row.layers) == (small.density, len(small.indices), 320, 5)
    assert (row.tokens, row.megabytes) == (640, large.nbytes / 1e6)
    assert row.seconds > 0
    assert built.count(640) == 4


def test_building_takes_the_median_of_the_builds_after_the_first(monkeypatch):
    clock = iter([0.0, 3.0, 10.0, 11.0, 20.0, 29.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    seconds, mask = measure.build_time(PATTERNS[0], 64, 16, repeats=3)
    assert seconds == 3.0
    assert mask == BlockMask.dense(64, block=16)


def test_a_choice_is_counted_without_its_room_and_has_no_layers_of_its_own():
    def build(tokens, block):
        scores = torch.arange(16.0).view(4, 4)
        return masks.top_k_blocks(scores, k=3, q_len=tokens, block=block, causal=True)

    row = measure.measure(Pattern("chosen", "", "", build, chosen=True), tokens=64, at=64, block=16, repeats=1)
    assert row.tiles == 1 + 2 + 3 + 3 and row.layers == "-"


def test_what_never_reaches_everything_says_so():
    row = measure.measure(
        Pattern("apart", "", "", lambda n, block: masks.chunked(n, chunk=16, block=16)), tokens=64, at=64
    )
    assert row.layers == "never"


def test_tiles_are_counted_a_head():
    layout = torch.zeros(4, 4, 4, dtype=torch.bool)
    layout[1:] = torch.eye(4, dtype=torch.bool)
    assert measure.tiles_a_head(BlockMask.from_layout(layout, block=16)) == 3.0


def test_layers_are_those_to_full_reach():
    by_name = {pattern.name: pattern for pattern in PATTERNS}
    assert measure.layers(by_name["butterfly"], 8 * 16, 16) == 3
    assert measure.layers(by_name["butterfly, causal"], 8 * 16, 16) == 3
    eye = Pattern("eye", "", "", lambda n, block: BlockMask.from_layout(torch.eye(n // block).bool(), block=block))
    assert measure.layers(eye, 64, 16) is None


# ---------------------------------------------------------------------- the peer


def search(times, *, seconds, most=flex.LONGEST):
    now, lines = [0.0], []

    def build(tokens):
        now[0] += times(tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex.time, "perf_counter", lambda: now[0])
        flex.search(build, lines.append, seconds=seconds, most=most)
    return [line.get("tokens", line.get("stopped")) for line in lines]


def test_lengths_double_until_the_next_would_take_too_long():
    assert search(lambda tokens: (tokens / 1024) ** 2, seconds=70) == [1024, 2048, 4096, 8192, "time"]
    assert search(lambda tokens: 1.0, seconds=70, most=4096) == [1024, 2048, 4096, "longest"]
    assert search(lambda tokens: 100.0, seconds=70) == ["time"]


def test_the_faster_of_two_builds_counts():
    calls = []

    def times(tokens):
        calls.append(tokens)
        return 50.0 if calls.count(tokens) == 1 else 1.0

    assert search(times, seconds=10, most=4096) == [1024, 2048, 4096, "longest"]


@pytest.mark.parametrize("failure", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_lengths_double_until_memory_is_short(failure):
    def times(tokens):
        if tokens > 4096:
            raise failure
        return 0.0

    assert search(times, seconds=10) == [1024, 2048, 4096, "memory"]


def test_other_errors_of_the_peer_are_not_taken_for_a_limit():
    def times(tokens):
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        search(times, seconds=10)


def test_a_process_is_stopped_at_its_limit_and_what_it_printed_is_kept():
    start = time.monotonic()
    program = 'import time; print(\'{"tokens": 1024, "seconds": 1.5, "megabytes": 2.0}\', flush=True); time.sleep(600)'
    printed, ended = flex.output_within([sys.executable, "-c", program], 2)
    assert time.monotonic() - start < 300
    assert flex.read(printed, ended) == Peer(1024, 1.5, 2.0, "time")


def test_a_process_that_fails_says_why():
    printed, ended = flex.output_within([sys.executable, "-c", "print('{}'); raise ValueError('so')"], 60)
    assert (printed, ended) == ("{}\n", "ValueError: so")
    assert flex.read(printed, ended) is None


def test_the_last_length_and_the_reason_are_read():
    printed = "noise\n" + "\n".join(
        json.dumps(line)
        for line in (
            {"tokens": 1024, "seconds": 1.0, "megabytes": 1.0},
            {"tokens": 2048, "seconds": 4.0, "megabytes": 3.0},
            {"stopped": "memory"},
        )
    )
    assert flex.read(printed, "") == Peer(2048, 4.0, 3.0, "memory")
    assert flex.read(printed + '\n{"tok', "") == Peer(2048, 4.0, 3.0, "memory")


def test_the_peak_is_that_of_the_program_not_of_what_started_it():
    large = b"1" * (400 << 20)
    program = "from experiments.benchmarks.patterns.flex import peak_bytes; print(peak_bytes())"
    printed, ended = flex.output_within([sys.executable, "-c", program], 60)
    assert ended == "" and int(printed) < len(large)


def test_flexattention_builds_its_mask_in_a_process_of_its_own():
    found = flex.longest("butterfly", "eager", block=128, seconds=400, gigabytes=8, most=2048)
    assert (found.tokens, found.stopped) == (2048, "longest")
    assert 0 < found.seconds < 400 and 0 < found.megabytes < 8000


# ---------------------------------------------------------------------- writing


def test_rows_become_markdown():
    header, _, row, dense = table.markdown(
        [ROW, Row("all", "basic", "every", 1.0, 16384.0, 16_384, "never", 1 << 17, 1.25, 1234.5)]
    ).splitlines()
    assert header == "| " + " | ".join(table.COLUMNS) + " |"
    assert row == (
        r"| local | \|q - k\| <= 4 | 1.23 % | 1,234 | 7 | 1M | 21.3 ms | 0.346 MB | 8K: 4.26 s, 1.65 GB | - |"
    )
    assert dense == "| all | every | 100 % | 16,384 | never | 128K | 1.25 s | 1.23 GB | - | - |"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00123, "1.23 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (61.23, "61.2 s")]
)
def test_durations_have_three_digits(seconds, text):
    assert table.duration(seconds) == text


def test_lengths_are_of_1024():
    assert [table.length(n) for n in (1000, 1024, 16_384, 1 << 20, 3 << 19)] == ["1,000", "1K", "16K", "1M", "1536K"]


def test_table_goes_between_its_marks(tmp_path):
    path = tmp_path / "deeper" / "README.md"
    table.put("first", path)
    assert path.read_text() == f"# The pattern library\n\n{table.BEGIN}\nfirst\n{table.END}\n"
    path.write_text("before\n" + path.read_text() + "after\n")
    table.put("second", path)
    assert path.read_text() == f"before\n# The pattern library\n\n{table.BEGIN}\nsecond\n{table.END}\nafter\n"
    path.write_text(f"{table.BEGIN}\n")
    with pytest.raises(ValueError, match=r"README\.md must have the marks .* once each, or not at all"):
        table.put("third", path)


def test_rows_are_kept_as_json(tmp_path):
    path = tmp_path / "deeper" / "rows.json"
    assert table.load(path) == {}
    table.save([ROW], path)
    assert table.load(path) == {"local": ROW}


def test_table_command_measures_some_and_keeps_the_others(tmp_path, no_analysis):
    results, out = tmp_path / "rows.json", tmp_path / "README.md"
    options = ["table", "--results", str(results), "--out", str(out), "--tokens", "256", "--at", "128", "--block", "16"]
    options += ["--repeats", "1", "--peers", "none", "--only"]
    result = CliRunner().invoke(cli.app, [*options, "local"])
    assert result.exit_code == 0, result.output
    kept = table.load(results)["local"]
    result = CliRunner().invoke(cli.app, [*options, "butterfly", "--only", "causal"])
    assert result.exit_code == 0, result.output
    rows = table.load(results)
    assert list(rows) == ["causal", "local", "butterfly"]
    assert rows["local"] == kept
    assert table.markdown(list(rows.values())) in result.output
    assert table.markdown(list(rows.values())) in out.read_text()


@pytest.mark.parametrize("options", [["--tokens", "64"], ["--at", "64"], ["--block", "16"]])
def test_a_test_with_other_sizes_does_not_replace_results(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["table", "--only", "local", "--peers", "none", *options])
    assert result.exit_code == 2
    assert "must not replace what is in experiments/results/patterns.json: name another file by" in " ".join(
        result.output.replace("│", " ").split()
    )
    assert not list(tmp_path.iterdir())


def test_table_command_keeps_the_peers_numbers_where_it_does_not_ask(tmp_path, no_analysis):
    results = tmp_path / "rows.json"
    table.save([ROW], results)
    options = ["table", "--results", str(results), "--tokens", "64", "--at", "64", "--block", "16", "--peers", "none"]
    result = CliRunner().invoke(cli.app, [*options, "--only", "local"])
    assert result.exit_code == 0, result.output
    assert table.load(results)["local"].eager == ROW.eager


def test_the_peer_is_asked_for_families_unless_told_otherwise():
    by_name = {pattern.name: pattern for pattern in PATTERNS}
    names = ["local", "local, causal", "expander"]
    included = {kind: [name for name in names if cli.is_asked(kind, by_name[name])] for kind in cli.PEERS}
    assert included == {"families": names[:1], "all": names[:2], "none": []}


def test_table_command_asks_the_peer_in_both_modes(tmp_path, no_analysis, monkeypatch):
    asked = []

    def longest(name, mode, **options):
        asked.append((name, mode, options))
        return Peer(1024, 1.0, 1.0, "time") if mode == "compiled" else None

    monkeypatch.setattr(flex, "longest", longest)
    results = tmp_path / "rows.json"
    options = ["--results", str(results), "--tokens", "64", "--at", "64", "--block", "16"]
    result = CliRunner().invoke(cli.app, ["table", *options, "--only", "local"])
    assert result.exit_code == 0, result.output
    limits = {"block": 16, "seconds": 4.0, "gigabytes": 8.0}
    assert asked == [("local", "eager", limits), ("local", "compiled", limits)]
    row = table.load(results)["local"]
    assert row.eager is None and row.compiled == Peer(1024, 1.0, 1.0, "time")
