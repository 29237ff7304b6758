import json

import pytest

from experiments.benchmarks.compile import versions
from experiments.benchmarks.compile.versions import COLUMNS, compared, compiled_with, write

ROW = dict(zip(COLUMNS, (1000, 168, 0, 4096, 0)))


def a_triton(folder, source="__version__ = '9.9.0'"):
    (folder / "triton").mkdir()
    (folder / "triton" / "__init__.py").write_text(source)
    return str(folder)


def test_another_triton_is_asked_in_a_process_of_its_own(tmp_path, monkeypatch):
    lines = "\n".join(map(json.dumps, ("9.9.0", ["portable dq", ROW])))
    monkeypatch.setattr(versions.sys, "executable", a_program(tmp_path, f"nanobind: leaked\n{lines}"))
    assert compiled_with(a_triton(tmp_path)) == ("9.9.0", {"portable dq": ROW})


def a_program(folder, says):
    file = folder / "says"
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    file.chmod(0o755)
    return str(file)


def test_a_triton_that_does_not_compile_is_an_error(tmp_path):
    folder = a_triton(tmp_path, "raise ImportError('no such kernel')")
    with pytest.raises(RuntimeError, match=r"the kernels must compile with Triton .*; they do not, see above"):
        compiled_with(folder)


def test_a_version_that_pip_does_not_have_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "CACHE", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match=r"--triton must be a version that pip can install .*; got 0\.0; pip says: "):
        compiled_with("0.0")


def test_only_kernels_that_differ_are_shown_and_all_are_written(tmp_path):
    more = ROW | {"spilled": 8, "instructions": 1005}
    found = {"3.6.0": {"forward": ROW, "dq": ROW}, "3.9.0": {"forward": ROW, "dq": more}}
    table = compared(found)
    assert [list(column.cells) for column in table.columns] == [
        ["dq"], ["1,000 / 1,005"], ["168"], ["0 / 8"], ["4,096"], ["0"],
    ]  # fmt: skip
    write(tmp_path / "versions.csv", found)
    lines = (tmp_path / "versions.csv").read_text().splitlines()
    assert lines[0] == "triton,kernel,instructions,registers,spilled,shared,serialised"
    assert lines[-1] == "3.9.0,dq,1005,168,8,4096,0" and len(lines) == 5
