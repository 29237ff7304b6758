"""Checks that results do not depend on the bound on scores, words or tiles that are computed at a time."""

from importlib import import_module
from unittest import mock


def assert_same_in_portions(make, module, name, most=1):
    """`make()` returns the same if the module's bound `name` is so small that the work is split into many portions."""
    whole = make()
    of = import_module(module)
    assert getattr(of, name) > 1000
    with mock.patch.object(of, name, most):
        assert make() == whole
