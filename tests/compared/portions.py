from importlib import import_module
from unittest import mock


def assert_same_in_portions(make, module, name, most=1):
    """`make()` returns the same if the bound `name` splits the work into many portions."""
    whole = make()
    of = import_module(module)
    assert getattr(of, name) > 1000
    with mock.patch.object(of, name, most):
        assert make() == whole
