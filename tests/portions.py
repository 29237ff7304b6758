"""What is computed a bounded number of scores, words or tiles at a time is the same in many portions as in one."""

from importlib import import_module
from unittest import mock


def assert_same_in_portions(make, module, name, most=1):
    """`make()` returns what it did, if the module's bound `name` is so small that there are many portions."""
    whole = make()
    of = import_module(module)
    assert getattr(of, name) > 1000
    with mock.patch.object(of, name, most):
        assert make() == whole
