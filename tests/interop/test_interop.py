"""What holds for all neighbours: names, documentation, and what `import` needs."""

import subprocess
import sys
from pathlib import Path

import pytest

from sparseflash import interop

ROOT = Path(__file__).resolve().parents[2]


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
