"""What holds for all neighbours: who imports whom, and what `import` needs."""

import subprocess
import sys
from pathlib import Path

import pytest

from layers import BACKENDS, LIBRARY, belongs, belongs_to_any, reached_from
from sparseflash import interop

ROOT = Path(__file__).resolve().parents[2]
MODULES = [m for m in LIBRARY if belongs(m, "sparseflash.interop") or m == "sparseflash.blockmask.serialization"]


@pytest.mark.parametrize("module", MODULES)
def test_exchange_and_files_know_no_backend_and_no_pattern(module):
    others = (*BACKENDS, "sparseflash.attention", "sparseflash.backends.registration", "sparseflash.masks")
    assert [m for m in reached_from(module) if belongs_to_any(m, others)] == []


def test_every_function_is_public_and_documented():
    for name in interop.__all__:
        function = getattr(interop, name)
        assert function.__doc__, name
        if name.startswith(("to_", "from_")):
            assert ">>>" in function.__doc__, f"{name} needs an example"
            assert f"`{name}`" in interop.__doc__, f"{name} is missing from the table"
    assert {name for name in vars(interop) if name.startswith(("to_", "from_"))} <= set(interop.__all__)


def test_no_neighbour_is_imported_before_it_is_asked_for():
    program = """
import sys

import sparseflash.interop

heavy = ("scipy", "torch.nn.attention.flex_attention", "flash_attn", "flashinfer", "deepspeed", "paddle")
found = [name for name in heavy if name in sys.modules]
assert not found, found
"""
    # PyTorch may itself bring SciPy or FlexAttention along; then this says nothing of our imports.
    before = subprocess.run(
        [sys.executable, "-c", program.replace("sparseflash.interop", "torch")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if before.returncode:
        pytest.skip(f"import torch alone fails this: {before.stderr.strip().splitlines()[-1]}")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
