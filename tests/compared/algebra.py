"""Shared checks of the mask algebra: a result's correctness, time and memory."""

import time
from pathlib import Path

import pytest

from sparseflash import BlockMask
from tests.processes.threads import threads


def assert_is(mask, dense):
    """The mask is canonical and has exactly these live scores, `[B or 1, H or 1, Nq, Nk]`."""
    mask.validate()
    assert mask.shape == dense.shape
    wrong = (mask.to_dense() != dense).nonzero()
    assert len(wrong) == 0, f"differs first at (b, h, q, k) = {wrong[0].tolist()}"
    assert mask.bake_lengths() == BlockMask.from_dense(dense, block=(mask.block_q, mask.block_k))


def peak_of(action):
    """`(result, seconds, megabytes)`: CPU time of this process, and the growth of its memory at the peak."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of memory is read from /proc")
    with threads(1):  # so that CPU time is work, not waiting threads
        action()  # allocations that happen only once
        Path("/proc/self/clear_refs").write_text("5")
        before, start = _kilobytes("VmRSS"), time.process_time()
        result = action()
        return result, time.process_time() - start, max(0, _kilobytes("VmHWM") - before) / 1000


def _kilobytes(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1])
