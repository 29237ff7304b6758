"""What holds for all neighbours: names, documentation, and what `import` needs."""

import pytest

from forked import python
from sparseflash import interop


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
    before = python("-c", program.replace("sparseflash.interop", "torch"))
    if before.returncode:
        pytest.skip(f"import torch alone fails this: {before.stderr.strip().splitlines()[-1]}")
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
