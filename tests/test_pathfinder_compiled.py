"""Compilation works where nothing can be written, and hides no other error."""

import numba
import pytest

from experiments.pathfinder.compiled import compiled


def double(x):
    return 2 * x


def refusing(message):
    def njit(*args, cache=False):
        if cache:
            raise RuntimeError(message)
        return numba.core.decorators.njit(*args)

    return njit


def test_without_a_place_for_the_cache_functions_are_compiled_all_the_same(monkeypatch):
    monkeypatch.setattr(numba, "njit", refusing("cannot cache function 'double': no locator available for file"))
    function = compiled(double)
    assert function(21) == 42
    assert function.signatures  # it is compiled


def test_other_errors_are_not_hidden(monkeypatch):
    monkeypatch.setattr(numba, "njit", refusing("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        compiled(double)
