import re
from dataclasses import replace

import pytest

from docs.figures import __main__ as command
from docs.figures import compiled, handwritten, marks, stale, store, tables, tried
from docs.figures.marks import contradictions, filled
from docs.figures.store import FigureError, figure, number
from docs.figures.table import Table, rendered
from experiments.measurements import Measurement, Run, write

RUN = Run("NVIDIA H200", "580.1", {"torch": "2.11.0", "triton": "3.6.0"}, "unknown", "2026-11-29", "python -m x")


def measured(name, value, spread=0.01, unit="ms", **more):
    return Measurement(name, value, spread, unit, **more)


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    times = [
        measured("speed/dense/64/forward/sparseflash", 0.3124),
        measured("speed/dense/64/forward/fa4", 0.3500),
        measured("speed/dense/64/forward/cudnn", 0.3150),
        measured("speed/causal/64/forward/sparseflash", 0.2, settings={"flops": 1e9}),
        measured("speed/causal/64/forward/fa4", 0.1),
        measured("speed/causal/64/forward/cudnn", None, None, failure="it has no causal mask"),
    ]
    write(folder / "speed" / "h200.jsonl", RUN, times)
    write(folder / "speed" / "h100.jsonl", replace(RUN, device="NVIDIA H100"), times[:1])
    for name in ("cpu", "h100"):
        write(folder / "memory" / f"{name}.jsonl", RUN, [measured("memory/dense/sparseflash", 1.5, None, "GiB")])
    seeds = measured("pathx/images/butterfly", 98.8, 0.00101, "%", spread_of="seeds", seeds=3)
    write(folder / "pathx" / "h100.jsonl", RUN, [seeds])
    return folder


@pytest.fixture
def page(tmp_path, results):

    def of(text, name="page.md"):
        path = tmp_path / name
        path.write_text(text)
        return filled(path, results)

    return of


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ("speed/dense/64/forward/fa4", "0.350 ms"),
        ("speed/dense/64/forward/sparseflash @ h100", "0.312 ms"),
        ("speed/dense/64/forward/fa4 / speed/dense/64/forward/sparseflash", "**1.12**"),
        ("speed/dense/64/forward/fa4 / speed/dense/64/forward/sparseflash @ h200", "**1.12**"),
        ("speed/dense/64/forward/cudnn / speed/dense/64/forward/sparseflash @ h200", "1.01"),
        ("speed/causal/64/forward/fa4 / speed/causal/64/forward/sparseflash @ h200", "0.50"),
        ("speed/*/64/forward/fa4 / speed/*/64/forward/sparseflash @ h200", "0.50 to 1.12"),
        (
            "speed/dense/64/forward/fa4 + speed/causal/64/forward/fa4 "
            "/ speed/dense/64/forward/sparseflash + speed/causal/64/forward/sparseflash",
            "0.88",  # (0.35 + 0.1) / (0.3124 + 0.2)
        ),
        ("speed/{dense,causal}/64/forward/fa4", "0.100 to 0.350 ms"),
        ("speed/*/64/forward/cudnn / speed/*/64/forward/sparseflash @ h200", "1.01"),
        ("speed/dense/64/forward/cudnn / speed/dense/64/forward/sparseflash @ h200 with noise", "1.01 ± 0.03"),
        ("speed/*/64/forward/fa4 / speed/*/64/forward/sparseflash @ h200 with noise", "0.50 to 1.12"),
        ("pathx/images/butterfly", "98.8 ± 0.1 %"),
        ("speed/causal/64/forward/sparseflash in TFLOP/s", "5.00 TFLOP/s"),
    ],
)
def test_a_figure_is_the_stored_value_or_a_ratio_of_one_run(results, request_, text):
    assert figure(request_, results).text == text


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ("speed/dense/64/forward/fa3", "speed/dense/64/forward/fa3 must be a measured name of the store; it is not"),
        ("speed/dense/64/forward/fa4 @ h100", "must be a measured name of the store, in h100"),
        ("speed/causal/64/forward/cudnn", "must be a measured name"),
        ("speed/dense/64/forward/fa4 in TFLOP/s", "must be a time with the work done, to be shown in TFLOP/s"),
        ("memory/dense/sparseflash", "must say of which run, as '@ FILE'; it is in cpu, h100"),
        ("speed/dense/64/forward/fa4 / speed/dense/64/forward/ours", "speed/dense/64/forward/ours must be a measured"),
        ("speed/dense/64/forward/fa4 / speed/*/64/forward/sparseflash", "must have no more wildcards"),
        (
            "speed/dense/64/forward/cudnn + speed/causal/64/forward/cudnn / speed/dense/64/forward/sparseflash",
            "speed/causal/64/forward/cudnn must be a measured name of speed/h200, to be added",
        ),
    ],
)
def test_what_the_store_cannot_give_is_an_error(results, request_, error):
    with pytest.raises(FigureError) as raised:
        figure(request_, results)
    assert error in str(raised.value)


@pytest.mark.parametrize(
    ("value", "spread", "text", "verdict"),
    [
        (1.12, 0.004, "**1.12**", "faster"),
        (1.12, 0.098, "**1.12** ± 0.11", "faster"),
        (1.12, 0.1, "1.12 ± 0.12", "as fast"),  # rounded up, so that the printed figures decide
        (1.5, 0.3, "**1.50** ± 0.45", "faster"),
        (1.5, 0.4, "1.50 ± 0.60", "as fast"),  # the spreads of the times are relative, the noise of their ratio is not
        (1.014, 0.006, "1.01", "as fast"),  # above 1 by more than its spread, but not as printed
        (0.98, 0.005, "0.98", "slower"),
        (0.5, 0.4, "0.50 ± 0.20", "slower"),
        (1.5, None, "1.50 ± ?", "as fast"),
    ],
)
def test_a_ratio_is_bold_if_it_is_above_one_by_more_than_the_noise_that_is_printed(
    tmp_path, value, spread, text, verdict
):
    times = [measured("speed/a/fa4", value, spread), measured("speed/a/sparseflash", 1.0, 0.0)]
    write(tmp_path / "speed" / "h200.jsonl", RUN, times)
    found = figure("speed/a/fa4 / speed/a/sparseflash with noise", tmp_path)
    assert found.text == text
    assert store.verdict(store.ratio(found.file.measurements, "speed/a/fa4", "speed/a/sparseflash")) == verdict


def test_numbers_have_three_digits():
    numbers = (0.3124, 0.00312, 12.0, 312.4, 4659.2, 0.0, 1.0)
    assert [number(each) for each in numbers] == ["0.312", "0.00312", "12.0", "312", "4,659", "0", "1.00"]


def test_a_page_that_is_out_of_date_is_found_and_written_anew(page):
    found = page(
        "It takes <!-- figure: speed/dense/64/forward/fa4 -->0.4 ms<!-- /figure -->.\n\n<!-- runs --><!-- /runs -->\n"
    )
    assert command.problems([found]) == ["page.md is out of date: run python -m docs.figures"]
    assert found.after == (
        "It takes <!-- figure: speed/dense/64/forward/fa4 -->0.350 ms<!-- /figure -->.\n\n<!-- runs -->\n"
        "- NVIDIA H200, torch 2.11.0, triton 3.6.0, commit unknown, 2026-11-29 "
        "([speed/h200](results/speed/h200.jsonl))\n"
        "<!-- /runs -->\n"
    )
    assert command.problems([page(found.after)]) == []


def test_a_figure_that_is_not_in_the_store_is_found(page):
    found = page("A line with <!-- figure: speed/sparse/64/forward/fa4 -->0.4 ms<!-- /figure -->.\n")
    assert command.problems([found]) == [
        "page.md: speed/sparse/64/forward/fa4 must be a measured name of the store; it is not"
    ]


def test_two_places_that_show_different_figures_of_one_name_are_found(page):
    mark = "A <!-- figure: speed/dense/64/forward/fa4 -->{}<!-- /figure -->.\n\n<!-- run: speed/h200 --><!-- /run -->\n"
    found = [page(mark.format("0.350 ms"), "a.md"), page(mark.format("0.4 ms"), "b.md")]
    (said,) = contradictions(found)
    assert said == "speed/dense/64/forward/fa4 of speed/h200: 0.350 ms in a.md, 0.4 ms in b.md"
    assert f"two places must show one figure; {said}" in command.problems(found)


def test_a_page_names_the_runs_that_it_cites(page):
    found = page("A <!-- figure: speed/dense/64/forward/fa4 -->0.350 ms<!-- /figure -->.\n")
    assert found.errors == [
        "a figure of speed/h200 needs its run on the page: add <!-- runs --><!-- /runs --> or "
        "<!-- run: speed/h200 --><!-- /run -->"
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a\n<!-- figure: pathx/images/butterfly -->1<!-- /figure -->", "must not stand first in a line"),
        ("a <!-- figure: pathx/images/butterfly -->1\n", "must have its other half"),
        (
            "a <!-- table: of-nothing --><!-- /table -->\n",
            "of-nothing must be one of those that docs/figures/tables.py",
        ),
        ("a <!-- run: speed/a100 --><!-- /run -->\n", "run: speed/a100 must be a file of the store"),
    ],
)
def test_a_mark_that_cannot_be_read_is_an_error(page, text, error):
    assert any(error in each for each in page(text).errors)


def test_marks_in_code_are_examples(page):
    text = "`<!-- figure: a/b -->1<!-- /figure -->`\n\n```\n<!-- figure: a/b -->1<!-- /figure -->\n```\n"
    found = page(text)
    assert (found.after, found.errors) == (text, [])


def test_figures_in_docstrings_are_written_too(page):
    text = '"""It takes <!-- figure: speed/dense/64/forward/fa4 --><!-- /figure --> `a`."""\n'
    assert page(text, "module.py").after == text.replace(" --><", " -->0.350 ms<")


def test_a_table_has_its_run_below_it_and_says_what_is_absent(page, monkeypatch):
    names = "speed/{column}/64/forward"
    table = Table(
        {"FlashAttention-4": "fa4", "cuDNN": "cudnn"}, {"dense": "dense", "causal": "causal"},
        f"{names}/{{row}} / {names}/sparseflash @ h200", absent="none",
    )  # fmt: skip
    monkeypatch.setitem(tables.TABLES, "peers", table)
    found = page("<!-- table: peers --><!-- /table -->\n")
    assert found.errors == []
    assert found.after.splitlines()[1:] == [
        "| | dense | causal |",
        "|---|---|---|",
        "| FlashAttention-4 | **1.12** ± 0.03 | 0.50 |",
        "| cuDNN | 1.01 ± 0.03 | none |",
        "",
        "Measured on NVIDIA H200, torch 2.11.0, triton 3.6.0, commit unknown, 2026-11-29 "
        "([speed/h200](results/speed/h200.jsonl)). ± is the noise; where there is no ±, it is at most 0.01.",
        "<!-- /table -->",
    ]
    monkeypatch.setitem(tables.TABLES, "peers", replace(table, absent=""))
    assert "must be a measured name" in page("<!-- table: peers --><!-- /table -->\n").errors[0]


def test_a_row_may_name_its_run_and_contain_the_column(results):
    rows = {"older": "dense/64/{column} @ h100", "newer": "dense/64/{column}"}
    found = rendered(Table(rows, {"a \\| b": "forward/sparseflash"}, "speed/{row}", "run"), results)
    assert [*found.files] == ["speed/h100", "speed/h200"]
    assert found.text.splitlines()[:2] == ["| run | a \\| b |", "|---|---|"]


def test_runs_of_one_machine_are_listed_below_it(page):
    names = ("speed/causal/64/forward/fa4", "pathx/images/butterfly", "memory/dense/sparseflash @ cpu")
    text = "".join(f"A <!-- figure: {name} --><!-- /figure -->.\n" for name in names)
    found = page(f"{text}\n<!-- runs --><!-- /runs -->\n")
    listed = found.after.partition("<!-- runs -->\n")[2]
    assert listed == (
        "- NVIDIA H200, torch 2.11.0, triton 3.6.0:\n"
        "    - commit unknown, 2026-11-29 ([memory/cpu](results/memory/cpu.jsonl))\n"
        "    - commit unknown, 2026-11-29 ([pathx/h100](results/pathx/h100.jsonl))\n"
        "    - commit unknown, 2026-11-29 ([speed/h200](results/speed/h200.jsonl))\n"
        "<!-- /runs -->\n"
    )
    assert page(found.after).is_current()


def test_a_table_names_its_run_only_where_the_page_lists_the_runs(page, monkeypatch):
    table = Table({"dense": "dense"}, {"forward": "speed/{row}/64/forward/fa4"}, "", "mask")
    monkeypatch.setitem(tables.TABLES, "times", table)
    found = page("<!-- table: times --><!-- /table -->\n\n<!-- runs --><!-- /runs -->\n")
    assert found.errors == []
    assert "\nRun: [speed/h200](results/speed/h200.jsonl). The noise of a figure is at most 1 %.\n" in found.after
    assert found.after.count("torch 2.11.0") == 1


@pytest.mark.parametrize("name", tables.TABLES)
def test_the_store_has_the_figures_of_every_table(name):
    assert rendered(tables.TABLES[name], store.RESULTS).files


def test_a_run_that_is_older_than_its_kernels_must_be_marked(page, monkeypatch):
    monkeypatch.setattr(marks, "changes", lambda file: 3)
    figure = "<!-- figure: speed/dense/64/forward/fa4 -->0.350 ms<!-- /figure -->"
    found = page(f"At {figure} (<!-- run: speed/h200 --><!-- /run -->).\n")
    assert found.after.endswith("speed/h200.jsonl)); the kernels have changed since<!-- /run -->).\n")
    said = "speed/h200 (unknown) is older than 3 changes of its kernels, which page.md must say: "
    said += "run python -m docs.figures"
    assert said in command.problems([found])
    marked = page(found.after)
    assert command.problems([marked]) == []
    monkeypatch.setattr(marks, "changes", lambda file: None)
    assert command.problems([page(found.after)]) == []
    monkeypatch.setattr(marks, "changes", lambda file: 0)
    assert command.problems([page(found.after)]) == ["page.md is out of date: run python -m docs.figures"]


def test_a_list_of_runs_marks_the_older_ones_and_says_once_what_the_mark_means(page, monkeypatch):
    monkeypatch.setattr(marks, "changes", lambda file: 3 if file.key == "speed/h200" else 0)
    names = ("speed/causal/64/forward/fa4", "memory/dense/sparseflash @ cpu")
    text = "".join(f"A <!-- figure: {name} --><!-- /figure -->.\n" for name in names)
    found = page(f"{text}\n<!-- runs --><!-- /runs -->\n")
    assert found.after.endswith(
        "    - commit unknown, 2026-11-29 ([memory/cpu](results/memory/cpu.jsonl))\n"
        "    - commit unknown, 2026-11-29 ([speed/h200](results/speed/h200.jsonl)) †\n\n"
        "† The kernels have changed since this run.\n<!-- /runs -->\n"
    )
    assert page(found.after).is_current()
    monkeypatch.setattr(marks, "changes", lambda file: None)
    assert page(found.after).is_current()


def test_the_age_of_a_run_is_read_from_the_history_of_its_kernels():
    paths = stale.KERNELS_OF["speed"]
    if stale.changes_since("f8db2f94", paths) is None:
        pytest.skip("git has no history here")
    assert stale.changes_since("0000000000", paths) is None
    assert stale.changes_since("f8db2f94", paths) > 0
    assert stale.changes_since("f8db2f94+changes", paths) == stale.changes_since("f8db2f94", paths)
    missing = {path for paths in stale.KERNELS_OF.values() for path in paths if not (store.ROOT / path).exists()}
    assert missing == set()


def test_every_stored_run_is_about_kernels_or_is_a_record():
    unknown = [key for key, file in store.stored().items() if not stale.kernels_of(file)]
    assert {key.partition("/")[0] for key in unknown} == stale.RECORDS


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It has 741 TFLOP/s.", ["1: 741 TFLOP/s"]),
        ("a\nIt is **1.96** times as fast, and takes 30 us.", ["2: 1.96** times as fast", "2: 30 us"]),
        ("It takes 1.2 times\nas long.", ["1: 1.2 times as long"]),
        ("98.8 ± 0.1 % of the images", ["1: 98.8 ± 0.1 %"]),
        ("| dense | 0.98 | **1.01** | 1.50 to 2.47 |", ["1: 0.98", "1: **1.01**", "1: 1.50 to 2.47"]),
        ("`30 us`, PyTorch 2.11, 16 GiB, 12.9 %, blocks of 128, 10 minutes, 132 SMs", []),
        ("<!-- figure: a/b -->30 us<!-- /figure -->", []),
        ("```\n30 us\n```", []),
    ],
)
def test_measured_numbers_by_hand_are_found(tmp_path, text, found):
    path = tmp_path / "page.md"
    path.write_text(text)
    assert handwritten.handwritten(path, ()) == [f"page.md:{each}" for each in found]


def test_a_sentence_may_be_allowed_while_it_is_there(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("The paper's model\nreads 20 tokens/s. Ours 30 tokens/s.\n")
    assert handwritten.handwritten(path, ("The paper's model reads 20 tokens/s.",)) == ["page.md:2: 30 tokens/s"]
    with pytest.raises(ValueError, match=r"'no such sentence' must stand in page\.md, where its number is allowed"):
        handwritten.handwritten(path, ("no such sentence",))


def test_the_readme_stays_short():
    text = (store.ROOT / "README.md").read_text()
    written = [content for kind, _, content in marks.MARK.findall(text) if kind == "figure"]
    of_tables = [content for kind, _, content in marks.MARK.findall(text) if kind == "table"]
    written += [cell for each in of_tables for line in each.splitlines() for cell in line.split("|")[2:]]
    numbers = [each for cell in written for each in re.findall(r"(?<!± )\b\d+\.\d+", cell)]
    assert len(text.splitlines()) <= 120
    assert 0 < len(numbers) <= 30


def test_docstrings_have_no_measured_numbers(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""A module."""\n\n\ndef f():\n    """It takes 1.2 times\n    as long."""\n    return 30  # us\n')
    assert handwritten.in_docstrings(path) == ["module.py:5: 1.2 times as long"]
    modules = [path for folder in ("sparseflash", "masks") for path in (store.ROOT / folder).rglob("*.py")]
    assert [each for path in modules for each in handwritten.in_docstrings(path)] == []


def test_the_figures_of_the_pages_are_those_of_the_store():
    assert command.problems([filled(path) for path in marks.pages()]) == []


@pytest.mark.parametrize(
    ("words", "status", "printed"),
    [
        (["--names", "speed/dense/128/forward/fa4"], 0, "speed/dense/128/forward/fa4 @ h200  "),
        (["--stale"], 0, "speed/h200 is old"),
        (["--check"], 1, "page.md is out of date: run python -m docs.figures"),
        ([], 0, "page.md"),
    ],
)
def test_the_command_lists_checks_and_writes(page, monkeypatch, capsys, words, status, printed):
    found = page("The <!-- text: triton-versions --><!-- /text -->\n")
    monkeypatch.setattr(command, "pages", lambda: [found.path])
    monkeypatch.setattr(command, "stale", lambda checked: ["speed/h200 is old"])
    monkeypatch.setattr("sys.argv", ["docs.figures", *words])
    assert command.main() == status
    assert printed in capsys.readouterr().out
    assert (found.path.read_text() == found.after) == (words == [])


def test_every_idea_that_was_tried_is_on_the_page_of_its_topic():
    for path in sorted((store.RESULTS / "tried").glob("*.md")):
        text = path.read_text()
        sections = {row["section"] for row in tried.rows_of(path.stem)}
        assert {f"<!-- table: tried/{f'{path.stem}/{each}'.rstrip('/')} -->" for each in sections} == {
            line for line in text.splitlines() if line.startswith("<!-- table")
        }
        outside = "".join(piece for kind, piece in marks.pieces_of(text) if kind == "text")
        assert not [line for line in outside.splitlines() if line.startswith("|")], path
    assert {path.stem for path in (store.RESULTS / "tried").glob("*.csv")} == {
        path.stem for path in (store.RESULTS / "tried").glob("*.md")
    }


def write_tried(results, *lines):
    (results / "tried").mkdir()
    (results / "tried" / "host.csv").write_text("\n".join([",".join(tried.COLUMNS), *lines]) + "\n")


def test_a_table_of_ideas_has_units_devices_and_commits(page, results):
    write_tried(results, "A,one call | two,0.9,5 to 4,us,H100,1234567,kept", "A,a cache,,,us,,,not built", "B,x,,1,,,,")
    assert page("<!-- table: tried/host/A --><!-- /table -->").after == (
        "<!-- table: tried/host/A -->\n| idea | predicted | measured | result |\n|---|---|---|---|\n"
        "| one call \\| two (1234567) | 0.9 | 5 to 4 | kept |\n| a cache | - | - | not built |\n\n"
        "Numbers without a unit: us. Device: H100.\n<!-- /table -->"
    )
    assert page("<!-- table: tried/host/B --><!-- /table -->").after.endswith(
        "|---|---|---|\n| x | 1 |  |\n<!-- /table -->"
    )
    assert page("<!-- table: tried/host/C --><!-- /table -->").errors == [
        "tried/host/C must be a section of tried/host.csv; it is not"
    ]


def test_an_idea_without_a_measurement_or_a_reason_is_refused(page, results):
    write_tried(results, "A,one call,0.9,,us,H100,1234567,")
    (error,) = page("<!-- table: tried/host/A --><!-- /table -->").errors
    assert error.startswith(
        "host.csv must have section, idea, predicted, measured, unit, device, commit, why, an idea and"
    )


def test_numbers_of_compiled_kernels_are_those_of_the_files(tmp_path):
    folder = tmp_path / "compile"
    folder.mkdir()
    (folder / "fits-triton-3.9.0.csv").write_text("case,config,stages\na,64x64x4x3q,3\na,64x64x4x3,2\nb,64x64x4x2,2\n")
    (folder / "versions.csv").write_text(
        "triton,kernel,instructions,spilled\n3.6.0,hopper D=64/64  forward_kernel,2568,0\n"
        "3.6.0,hopper D=64/64 sink learned backward_kernel,100,16\n3.6.0,portable D=64 forward_kernel,7,0\n"
        "3.9.0,hopper D=64/64  forward_kernel,2552,4\n3.9.0,hopper D=64/64 sink learned backward_kernel,90,8\n"
    )
    assert compiled.fits(tmp_path) == "All 3 kernels of 2 cases fit, 1 of them with fewer pipeline stages than chosen."
    assert compiled.forwards(tmp_path).splitlines()[2:] == ["| D=64/64 | 2,568, 0 | 2,552, 4 |"]
    assert "spill 16 to 16 bytes a thread under Triton 3.6.0, 8 to 8 bytes" in compiled.spills(tmp_path)


def test_the_store_stays_small():
    """Fewer than 150 files and 2 MiB; no page of more than 1,500 words."""
    files = [path for path in store.RESULTS.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(files) < 150
    assert sum(path.stat().st_size for path in files) < 2 * 2**20
    assert {
        path.name: n for path in files if path.suffix == ".md" and (n := len(path.read_text().split())) > 1500
    } == {}
