"""Reports on compiled kernels are read completely, and compared between versions of Triton."""

import json
import subprocess
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from experiments.benchmarks.compile import hopper, versions
from experiments.benchmarks.compile.shipped import Kernel, groups, read, write
from sparseflash.backends.triton.launcher import BoundLaunch
from tests.compiling.uninterpreted import python

FORWARD = Kernel(90, "hopper", "forward", "bfloat16", 64, "")
NUMBERS = {"instructions": 2568, "registers": 168, "spilled": 0, "shared": 180952, "serialised": 0}


def test_what_a_kernel_uses_is_that_of_the_code_that_is_launched():
    source = (
        "import json\n"
        "from experiments.benchmarks.compile.report import launched\n"
        "from experiments.benchmarks.compile.resources import disassembled, opcodes_of, resources_of\n"
        "(_, kernel), = launched(80, 'bfloat16', 16, only='forward', assemble=True)\n"
        "used = resources_of(kernel)\n"
        "launched = opcodes_of(disassembled(kernel.asm['cubin']))\n"
        "print(json.dumps([used[0], used.shared, used.instructions, used.opcodes, launched]))"
    )
    done = python("-c", source)
    assert done.returncode == 0, done.stderr[-2000:]
    (registers, spilled, serialised), shared, instructions, opcodes, launched = json.loads(done.stdout)
    assert opcodes == launched and sum(opcodes.values()) == instructions
    assert opcodes["HMMA"] > 0 and opcodes["MUFU"] > 0
    assert 32 <= registers <= 255 and spilled < 64 and not serialised and 0 < shared < 166_912


def test_hopper_kernels_of_one_process_are_those_that_were_asked_for(monkeypatch):
    """Passes are cached by a key, which does not contain everything that a mask or a rule may change."""
    monkeypatch.setattr(BoundLaunch, "compiled", lambda self: self)
    found = [
        hopper.compiled(dim, torch.bfloat16, features)["forward_kernel"][0].launch
        for dim, features in ((64, ["alibi"]), (128, ["alibi"]), (64, ["lengths"]), (64, ["alibi", "parts"]))
    ]
    assert len({launch.variant for launch in found}) == 4
    with pytest.raises(ValueError, match=r"features must be of small, lengths, parts, .*; got window"):
        hopper.compiled(64, torch.bfloat16, ["window"])


def test_kernels_in_which_versions_differ_are_shown_beside_one_another():
    other = FORWARD._replace(features="lengths")
    found = {
        "3.6.0": {FORWARD: NUMBERS, other: NUMBERS},
        "3.9.0": {FORWARD: {**NUMBERS, "instructions": 3488}, other: {**NUMBERS, "instructions": 2570}},
    }

    def shown(**how):
        console = Console(width=200)
        with console.capture() as text:
            console.print(versions.compared(found, **how))
        return text.get()

    assert "2,568 / 3,488" in shown() and "lengths" not in shown() and "180,952" in shown()
    assert "lengths" in shown(every=True)


def test_results_are_stored_sorted_and_read_back(tmp_path):
    path = tmp_path / "new" / "kernels.csv"
    assert read(path) == {}
    found = {FORWARD._replace(dim=128): NUMBERS, FORWARD: NUMBERS}
    write(path, found)
    assert read(path) == found and list(read(path)) == [FORWARD, FORWARD._replace(dim=128)]


def test_every_family_and_architecture_has_kernels_and_none_twice():
    every = groups((80, 89, 90, 100), ("hopper", "portable"))
    assert len(set(every)) == len(every)
    assert {group.arch for group in every} == {80, 89, 90, 100}
    assert {group.arch for group in groups((80, 90), ("hopper",))} == {90}


def test_a_folder_is_taken_as_it_is_and_a_version_is_installed_once(tmp_path, monkeypatch, capsys):
    own = tmp_path / "own"
    (own / "triton").mkdir(parents=True)
    (own / "triton" / "__init__.py").write_text('"""isort:skip_file"""\n__version__ = \'3.7.1\'\n')
    assert versions.folder_of(str(own), tmp_path) == own and versions.version_in(own) == "3.7.1"
    asked = []

    def pip(command, **how):
        asked.append(command)
        (tmp_path / "triton-3.5.0" / "triton").mkdir(parents=True)
        (tmp_path / "triton-3.5.0" / "triton" / "__init__.py").touch()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", pip)
    for _ in range(2):
        assert versions.folder_of("3.5.0", tmp_path) == tmp_path / "triton-3.5.0"
    assert len(asked) == 1 and asked[0][-1] == "triton==3.5.0"
    assert "pip installs Triton 3.5.0 into" in capsys.readouterr().err
    assert (versions.folder_of(version("triton"), tmp_path) / "triton" / "__init__.py").exists() and len(asked) == 1
    with pytest.raises(RuntimeError, match="must hold a Triton that sets __version__; found none"):
        versions.version_in(tmp_path / "triton-3.5.0")


def test_what_pip_says_of_a_version_that_it_cannot_install_is_passed_on(tmp_path, monkeypatch):
    refused = SimpleNamespace(returncode=1, stderr="noise\nERROR: No matching distribution found for triton==0.1\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **how: refused)
    with pytest.raises(RuntimeError, match=r"--triton must be a version that pip can install .* No matching distrib"):
        versions.folder_of("0.1", tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shipped", "--arch", "70"], "--arch must be from 80, 89, 90, 100; got 70."),
        (["shipped", "--family", "ampere"], "--family must be from hopper, portable; got ampere."),
        (["fits", "--changes", "all"], "--changes must be from none, few, any; got all."),
    ],
)
def test_options_that_cannot_be_served_are_explained(words, message):
    done = python("-m", "experiments.benchmarks.compile", *words)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
