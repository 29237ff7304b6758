"""Calls a function in a new process with empty caches of compiled kernels, as on a user's first call.

`python -m experiments.benchmarks.fresh_process` reads the call from standard input and prints JSON in its last line.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
ROOT = Path(__file__).parents[2]


def answer_of(function: Callable[..., Any], *arguments: object, limit: float = 240.0) -> Any:
    module = function.__module__
    if module == "__main__":
        module = sys.modules[module].__spec__.name
    question = pickle.dumps((module, function.__name__, arguments))
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "experiments.benchmarks.fresh_process"], input=question, capture_output=True,
                timeout=limit, check=True, cwd=ROOT,
                env=os.environ | {cache: str(Path(empty, cache)) for cache in CACHES},
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            raise RuntimeError(f"no answer after {limit:g} s") from late
        except subprocess.CalledProcessError as failure:
            print(failure.stderr.decode(errors="replace")[-1500:], file=sys.stderr, flush=True)
            raise RuntimeError(f"the process ended with {failure.returncode}") from failure
    return json.loads(done.stdout.decode().splitlines()[-1])  # libraries may have printed before


def main() -> None:
    module, name, arguments = pickle.loads(sys.stdin.buffer.read())
    answer = getattr(import_module(module), name)(*arguments)
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
