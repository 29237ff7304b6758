"""A mask that is kept is made anew when anything that its function reads has changed."""

import array
import operator
import profile
import sys
from collections import UserDict, deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparseflash import masks
from sparseflash.blockmask.cache import clear_caches
from sparseflash.captured import Captured
from sparseflash.varlen import varlen_mask


class OfClass:
    window = 16

    @classmethod
    def doubled(cls):
        return 2 * cls.window


@dataclass(slots=True)
class Slots:
    window: int = 16


class Forwarding:
    def __init__(self):
        self.fields = {"window": 16}

    def __getattr__(self, name):
        return self.fields[name]


class Sized:
    def __init__(self):
        self.size = 16

    def __len__(self):
        return self.size


class Layer(torch.nn.Module):
    window = 16


def of_a_function():
    def pattern():
        return pattern.window

    pattern.window = 16
    return pattern


class Decoder:
    def __init__(self):
        self.positions = torch.zeros(3)

    def live(self, q, k):
        return self.positions[q] >= k


def rename(held):
    held[32] = held.pop(16)


def put(held):
    held[0] = 32


def set_window(held):
    held.window = 32


CASES = {
    "attribute of a class": (lambda: type("Mine", (OfClass,), {}), lambda c: c.window, set_window),
    "method of a class": (lambda: type("Mine", (OfClass,), {}), lambda c: c.doubled(), set_window),
    "bound method of a class": (
        lambda: SimpleNamespace(of=type("Mine", (OfClass,), {})), lambda x: x.of.doubled(), lambda x: set_window(x.of),
    ),
    "attribute of an object's class": (
        lambda: type("Mine", (OfClass,), {})(), lambda x: x.window, lambda x: set_window(type(x)),
    ),
    "slots": (Slots, lambda x: x.window, set_window),
    "attributes by __getattr__": (Forwarding, lambda x: x.window, lambda x: x.fields.update(window=32)),
    "getattr": (lambda: SimpleNamespace(window=16), lambda x: getattr(x, "window"), set_window),  # noqa: B009
    "size": (Sized, len, lambda x: setattr(x, "size", 32)),
    "keys": (lambda: {16: None}, lambda x: next(iter(x)), rename),
    "bound method of a dict": (lambda: {0: 16}, lambda x: x.get(0), put),
    "NumPy": (lambda: np.array([16]), lambda x: int(x[0]), put),
    "deque": (lambda: deque([16]), lambda x: x[0], put),
    "UserDict": (lambda: UserDict({0: 16}), lambda x: x[0], put),
    "bytearray": (lambda: bytearray([16]), lambda x: x[0], put),
    "array": (lambda: array.array("i", [16]), lambda x: x[0], put),
    "shape in NumPy": (lambda: np.arange(16).reshape(2, 8), lambda x: int(x[1, 0]), lambda x: x.resize(4, 4)),
    "place of an item": (lambda: [[16], []], lambda x: len(x[0]) + 1, lambda x: x[1].append(x[0].pop())),
    "order of items": (
        lambda: [a := SimpleNamespace(window=16), b := SimpleNamespace(window=32), a, b],
        lambda x: x[2].window, lambda x: operator.setitem(x, 2, x[1]),
    ),
    "names in a tuple": (Slots, lambda x: next(getattr(x, name) for name in ("window", "__doc__")), set_window),
    "item of a ModuleList": (lambda: torch.nn.ModuleList([Layer()]), lambda x: x[0].window, lambda x: set_window(x[0])),
    "item of a ParameterList": (
        lambda: torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(16.0))]), lambda x: int(x[0]),
        lambda x: x[0].detach().fill_(32),
    ),
    "attribute of a function": (of_a_function, lambda f: f(), set_window),
    "code": (lambda: lambda: 16, lambda f: f(), lambda f: setattr(f, "__code__", (lambda: 32).__code__)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_changed_in_place_is_seen(case):
    make, read, change = CASES[case]
    held = make()

    def pattern(n):
        return masks.local(n, window=read(held), causal=True)

    if case == "size":
        pattern = lambda n: masks.local(n, window=len(held), causal=True)  # noqa: E731
    if case == "bound method of a dict":
        read = held.get
        pattern = lambda n: masks.local(n, window=read(0), causal=True)  # noqa: E731
    before = varlen_mask([0, 50, 120], pattern=pattern)
    change(held)
    after = varlen_mask([0, 50, 120], pattern=pattern)
    assert before != after == varlen_mask([0, 50, 120], pattern=lambda n: pattern(n))


def test_functions_that_read_other_attributes_of_one_object():
    held = SimpleNamespace(window=16, sink=2)

    def window():
        return held.window

    def sink():
        return held.sink

    def both():
        return window() + sink()

    for name in ("sink", "window"):
        before = Captured(both)
        assert before.is_still(Captured(both))
        setattr(held, name, 32)
        assert not before.is_still(Captured(both))


def test_what_cannot_change_is_still_the_same():
    held = [Slots(), OfClass, OfClass(), Forwarding(), Sized(), {1: 2}, np.arange(3), range(4), object()]
    options = {"causal": True}

    def pattern(n):
        return masks.local(n, window=len(held) + held[0].window + held[2].window, **options)

    for each in (pattern, partial(pattern, 3), partial(masks.local, **options)):
        assert Captured(each).is_still(Captured(each))
    assert varlen_mask([0, 50, 120], pattern=pattern) is varlen_mask([0, 50, 120], pattern=pattern)


def test_a_script_that_an_installed_module_runs_is_the_users_own(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", profile.__file__, raising=False)
    clear_caches()
    place = {"__name__": "__main__", "window": 16}
    exec("def rule(q, k):\n    return q - k < window", place)
    before = Captured(place["rule"])
    place["window"] = 32
    assert not before.is_still(Captured(place["rule"]))


def test_what_a_function_captures():
    table, box, number = torch.zeros(3), {"a": [1, 2]}, 4

    def inner(x):
        return x + number

    def rule(x, y=box):
        return [inner(x) + table[each] for each in y["a"]]

    def now():
        return Captured(rule, partial(rule, 3), Decoder().live)

    before = Captured(rule)
    assert before.is_still(Captured(rule)) and [x is table for x in before.tensors] == [True]
    for change in (lambda: table.add_(1), lambda: box["a"].append(3)):
        before = Captured(rule)
        change()
        assert not before.is_still(Captured(rule))
    before, number = Captured(rule), 5
    assert not before.is_still(Captured(rule)) and now().tensors
