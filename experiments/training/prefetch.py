from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from types import TracebackType
from typing import Any, TypeVar

from experiments.training.workers import available_cores, leave_signals_to_parent, worker_pool

AHEAD = 3  # of the loop, for each process

Result = TypeVar("Result")


class Prefetcher:
    """With 0 workers this process computes each result on demand. waited: seconds of the loop."""

    def __init__(self, workers: int | None = None) -> None:
        self.workers = max(1, available_cores() - 1) if workers is None else workers
        self.waited = 0.0
        self._pool: ProcessPoolExecutor | None = None
        if self.workers:
            self._pool = worker_pool(self.workers, leave_signals_to_parent)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def in_order(
        self, function: Callable[..., Result], calls: Iterator[tuple[Any, ...]]
    ) -> Generator[Result, None, None]:
        if self._pool is None:
            for arguments in calls:
                yield function(*arguments)
            return
        waiting: deque[Future[Result]] = deque()
        try:
            while True:
                for arguments in islice(calls, AHEAD * self.workers - len(waiting)):
                    waiting.append(self._pool.submit(function, *arguments))
                if not waiting:
                    return
                begun = time.perf_counter()
                result = waiting.popleft().result()
                self.waited += time.perf_counter() - begun
                yield result
        finally:
            for future in waiting:
                future.cancel()

    def begin_all(
        self, function: Callable[..., Result], calls: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Result]]:
        if self._pool is None:
            return lambda: [function(*arguments) for arguments in calls]
        futures = [self._pool.submit(function, *arguments) for arguments in calls]
        return lambda: [future.result() for future in futures]
