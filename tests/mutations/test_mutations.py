from pathlib import Path

import pytest

from tests.mutations import mutation_runner
from tests.mutations.mutation_list import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[each.name for each in MUTATIONS])
def test_every_listed_fault_can_be_made_and_has_its_test(mutation):
    assert mutation_runner.fault_of(mutation, ROOT) is None
    assert mutation.new != mutation.old


def test_names_of_faults_are_their_own():
    assert len({each.name for each in MUTATIONS}) == len(MUTATIONS)


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "half.py").write_text("def half(x):\n    return x // 2\n")
    (tmp_path / "test_half.py").write_text("from half import half\n\ndef test_half():\n    assert half(4) == 2\n")
    return tmp_path


KILLED = Mutation("by three", "half.py", "// 2", "// 3", "test_half.py::test_half")
SURVIVES = Mutation("exactly", "half.py", "// 2", "/ 2", "test_half.py::test_half")


def rows(printed):
    lines = [line.split() for line in printed.splitlines()]
    return [" ".join(line[: line.index("s") - 1] if "s" in line else line) for line in lines]


def test_a_fault_is_killed_or_survives_in_a_copy_of_the_tree(tree, capsys):
    before = {path.name: path.read_text() for path in tree.iterdir()}
    assert mutation_runner.main([KILLED, SURVIVES], tree, ["-k", "half"]) == 1
    assert rows(capsys.readouterr().out) == [
        "no change passed", "by three killed", "exactly SURVIVED", "1 of 2 killed",
    ]  # fmt: skip
    assert {path.name: path.read_text() for path in tree.iterdir()} == before


@pytest.mark.parametrize(
    ("codes", "exit_code", "printed"),
    [
        ([0, 1], 0, ["no change passed", "by three killed", "1 of 1 killed"]),
        ([0, 4], 1, ["no change passed", "by three NOT RUN, pytest's exit code is 4", "why", "0 of 1 killed"]),
        ([1], 1, ["no change FAILED", "why"]),
    ],
)
def test_only_tests_that_pass_without_a_fault_and_fail_with_it_kill_it(
    tree, capsys, monkeypatch, codes, exit_code, printed
):
    given = iter(codes)
    monkeypatch.setattr(mutation_runner, "passes", lambda copy, *tests: (next(given), 1.0, "why"))
    assert mutation_runner.main([KILLED], tree, []) == exit_code
    assert rows(capsys.readouterr().out) == printed


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"old": "// 5"}, "by three: half.py must have '// 5' once; found it 0 times"),
        ({"file": "test_half.py", "old": "half"}, "by three: test_half.py must have 'half' once; found it 4 times"),
        ({"file": "third.py"}, "by three: third.py must have '// 2' once; found it 0 times"),
        ({"test": "test_half.py::test_third[2]"}, "by three: test_half.py must have the test test_third[2]"),
        ({"test": "test_third.py::test_half"}, "by three: test_third.py must have the test test_half"),
    ],
)
def test_what_cannot_be_made_or_tested_is_said(tree, capsys, change, why):
    assert mutation_runner.main([KILLED._replace(**change)], tree, []) == 1
    assert capsys.readouterr().out == f"{why}\n"


def test_faults_are_listed_and_chosen_by_name_or_file(tree, capsys):
    assert mutation_runner.main([KILLED, SURVIVES], tree, ["--list", "-k", "three"]) == 0
    assert capsys.readouterr().out == "by three\n    half.py\n  - // 2\n  + // 3\n    test_half.py::test_half\n"
    assert mutation_runner.main([KILLED], tree, ["-k", "fourth"]) == 1
    assert "no change has 'fourth' in its name or file" in capsys.readouterr().out
