import os
import sys
import threading

import numpy as np
import pytest
import torch

from experiments.training.workers import THREADS, available_cores, worker_pool


def threads_of_libraries() -> tuple[int, int]:
    square = np.ones((600, 600))
    assert (square @ square)[0, 0] == 600
    return len(os.listdir("/proc/self/task")) - threading.active_count(), torch.get_num_threads()


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.skipif(available_cores() < 2, reason="libraries use one thread on one core anyway")
@pytest.mark.parametrize("given", [None, "2"])
def test_a_worker_uses_one_thread_whatever_the_environment_says(monkeypatch, given):
    for name in THREADS:
        if given is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, given)
    before = dict(os.environ)
    with worker_pool(1) as pool:
        assert pool.submit(threads_of_libraries).result() == (0, 1)
    assert dict(os.environ) == before
