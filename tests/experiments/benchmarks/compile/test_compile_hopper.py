import json

import pytest
import torch

from experiments.benchmarks.compile import hopper
from sparseflash.backends.triton.launcher import BoundLaunch
from tests.compiling.uninterpreted import python


def test_what_ptxas_says_is_of_the_code_that_is_launched():
    source = (
        "import json\n"
        "from experiments.benchmarks.compile.report import launched\n"
        "from experiments.benchmarks.compile.resources import disassembled, said_by_ptxas\n"
        "(_, kernel), = launched(80, 'bfloat16', 16, only='forward', assemble=True)\n"
        "said, cubin = said_by_ptxas(kernel)\n"
        "print(json.dumps([said, *(disassembled([each], 80) for each in (cubin, kernel.asm['cubin']))]))"
    )
    done = python("-c", source)
    assert done.returncode == 0, done.stderr[-2000:]
    (registers, spilled, serialised), (again,), (launched,) = json.loads(done.stdout)
    assert again == launched and any("HMMA" in line for line in again)
    assert 32 <= registers <= 255 and spilled < 64 and not serialised


def test_hopper_kernels_of_one_process_are_those_that_were_asked_for(monkeypatch):
    """Cached passes have a key, which leaves out some contents of masks and rules."""
    monkeypatch.setattr(BoundLaunch, "compiled", lambda self: self)
    found = [
        hopper.compiled(dim, torch.bfloat16, features)["forward_kernel"][0].launch
        for dim, features in ((64, ["alibi"]), (128, ["alibi"]), (64, ["lengths"]), (64, ["alibi", "parts"]))
    ]
    assert len({launch.variant for launch in found}) == 4
    with pytest.raises(ValueError, match=r"features must be of small, spread, lengths, parts, .*; got window"):
        hopper.compiled(64, torch.bfloat16, ["window"])
