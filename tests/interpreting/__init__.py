"""Kernels on the CPU: Triton's interpreter made like a GPU and quick, checks in it, and an emulator of Gluon.

value_types.py, operators.py, patched_once.py    what the interpreter does for every value, it does once
indices.py                                       counts up to computed numbers with any NumPy
products.py                                      matrix products as matrix units sum them
bounds.py                                        addresses outside a kernel's arguments are errors
gluon/                                           Gluon kernels, which Triton's interpreter does not take
"""


def interpret_quickly(monkeypatch):
    """For every process with Triton's interpreter. The results are the interpreter's own."""
    from tests.interpreting.indices import index_by_scalars
    from tests.interpreting.operators import compute_by_numpy
    from tests.interpreting.patched_once import patch_once_a_launch
    from tests.interpreting.value_types import share_types

    for change in (patch_once_a_launch, share_types, compute_by_numpy, index_by_scalars):
        change(monkeypatch)
