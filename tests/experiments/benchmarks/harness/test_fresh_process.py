import os
import sys
import time

import pytest

from experiments.benchmarks.fresh_process import CACHES, answer_of


def test_a_function_answers_from_another_process_with_empty_caches():
    assert answer_of(os.getpid) != os.getpid()
    caches = [answer_of(os.getenv, name) for name in CACHES]
    assert all(caches) and not any(os.path.exists(path) for path in caches)
    assert answer_of(sorted, [3, 1, 2]) == [1, 2, 3]


def test_a_process_that_fails_or_is_late_is_an_error():
    with pytest.raises(RuntimeError, match="the process ended with 3"):
        answer_of(sys.exit, 3)
    with pytest.raises(RuntimeError, match=r"no answer after 0\.5 s"):
        answer_of(time.sleep, 60, limit=0.5)
