"""Runs a module in a new process with empty caches of compiled kernels, as on a user's first call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# The variables that name the caches of Triton, torch.compile and CuTe.
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
ROOT = Path(__file__).parents[2]


def output_of(module: str, *arguments: str, question: bytes = b"", limit: float) -> str:
    """What `python -m module arguments` prints, given `question` on standard input, with empty caches.

    Raises RuntimeError with the end of the process's output if it fails or takes longer than `limit` seconds.
    """
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, *arguments], input=question, capture_output=True, timeout=limit,
                check=True, cwd=ROOT, env=os.environ | {cache: str(Path(empty, cache)) for cache in CACHES},
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            raise RuntimeError(f"no answer after {limit:g} s") from late
        except subprocess.CalledProcessError as failure:
            print(failure.stderr.decode(errors="replace")[-1500:], file=sys.stderr, flush=True)
            raise RuntimeError(f"the process ended with {failure.returncode}") from failure
    return done.stdout.decode()


def print_answer(answer: Any) -> None:
    """Prints what `answer_in` finds: plain values, on a line of their own after whatever else was printed."""
    print("\n" + json.dumps(answer), flush=True)


def answer_in(output: str) -> Any:
    """What the process printed last by `print_answer`."""
    return json.loads(output.splitlines()[-1])
