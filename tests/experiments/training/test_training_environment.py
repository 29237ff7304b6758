import sys

import pytest

from experiments.training.environment import command_line


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("--group dims --out /here", "--group dims"),
        ("--out=/here --cases d*", "--cases 'd*'"),
        ("--runs /there --output 3 --out /here", "--output 3"),
        ("--quick --out", "--quick"),
    ],
)
def test_a_command_is_stored_without_its_folders(monkeypatch, words, kept):
    monkeypatch.setattr(sys, "argv", ["program", *words.split()])
    assert command_line("some.module", without=("--out", "--runs")) == f"python -m some.module {kept}"


def test_a_command_is_stored_with_what_started_it(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program", "measure"])
    program = ("torchrun", "--nproc-per-node", "2")
    assert command_line("some.module", program=program) == "torchrun --nproc-per-node 2 -m some.module measure"
