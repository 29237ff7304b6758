"""Kernels without one of the lines that order their warps: the interpreter must notice each."""

from itertools import product
from pathlib import Path

import pytest
import torch

from tests.interpreting.gluon import Deadlock

SYNCHRONISES = (
    "mbarrier.wait(", "mbarrier.arrive(", "async_copy.mbarrier_arrive(", "tma.store_wait(", "fence_async_shared(",
    "weights_are(", "wait_for_turn(", "sent_is_visible(", "gl.atomic_add(",
)  # fmt: skip


def synchronising_lines(module, after="", upto=""):
    """The numbers of a kernel file's lines that wait, arrive, fence or take turns. after, upto: titles of sections of
    the file, to take the lines between.
    """
    text = Path(module.__file__).read_text()
    lines = text.splitlines()
    begin, end = (text[: text.index(f"-- {title}\n")].count("\n") if title else None for title in (after, upto))
    return [i for i in range(len(lines))[begin:end] if lines[i].strip().startswith(SYNCHRONISES)]


def lines_of(*modules):
    """`synchronising_lines` of several files, as parameters `(module, line)` of a test."""
    return [
        pytest.param(module, line, id=f"{module.__name__.rpartition('_')[2]}-{line}")
        for module in modules
        for line in synchronising_lines(module)
    ]


def without(line):

    def changed(source):
        lines = source.splitlines()
        indent = lines[line][: len(lines[line]) - len(lines[line].lstrip())]
        return "\n".join([*lines[:line], f"{indent}pass", *lines[line + 1 :]])

    return changed


def assert_noticed(cases, ways):
    """cases: pairs of a function that runs the kernel, and its right result."""
    for way, (run, right) in product(ways, cases):
        try:
            got = run(**way)
        except (Deadlock, AssertionError):
            return
        if not all(map(torch.equal, got, right)):
            return
    raise AssertionError(f"{len(ways)} interleavings without it gave the right results")
