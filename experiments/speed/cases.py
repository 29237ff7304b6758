"""What is measured: one `Case` a row of the tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatch

import torch

FORWARD, BACKWARD, CALL = "forward", "backward", "call"
# A backward pass runs five matrix products of the forward's size, the forward two.
FLOPS_OF_PASS = {FORWARD: 1.0, BACKWARD: 2.5, CALL: 1.0}


@dataclass(frozen=True)
class Case:
    """q, k, v of shape [batch, heads, length, head_dim] under the mask `kind` of patterns.py.

    `passes`: FORWARD (without gradients), BACKWARD, or CALL alone: host time of a call in a loop of inference
    calls. `main`: one of the cases of `--quick`.
    """

    name: str
    kind: str
    batch: int
    heads: int
    length: int  # tokens
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    passes: tuple[str, ...] = (FORWARD, BACKWARD)
    block: int = 128  # tokens
    main: bool = False

    def shrunk(self, length: int, block: int) -> Case:
        """The same case with one sequence of `length` tokens, two heads and mask blocks of `block` tokens."""
        return replace(self, batch=1, heads=2, length=length, block=block)


def useful_flops(case: Case, kept: int, direction: str) -> float:
    """4 * D * kept scores * heads * batch forward, 2.5 times that backward: dead scores count nothing."""
    return 4.0 * case.head_dim * kept * case.heads * case.batch * FLOPS_OF_PASS[direction]


def _main(head_dim: int, heads: int) -> list[Case]:
    kinds = ("dense", "causal", "butterfly", "local", "bigbird", "random12")
    return [Case(f"d{head_dim}-{kind}", kind, 1, heads, 16384, head_dim, main=True) for kind in kinds]


def _windows(head_dim: int, heads: int) -> list[Case]:
    kinds = ("window256", "window64")
    return [Case(f"d{head_dim}-{kind}", kind, 1, heads, 16384, head_dim) for kind in kinds]


# Calls first: torch.compile's guards are then few, which is what a user of one mask pays. What matters least
# is last.
CASES: tuple[Case, ...] = (
    Case("call-dense", "dense", 1, 8, 256, 64, passes=(CALL,)),
    Case("call-causal", "causal", 1, 8, 256, 64, passes=(CALL,)),
    *_main(128, 16),
    *_main(64, 32),
    Case("fp32-butterfly", "butterfly", 1, 16, 8192, 64, dtype=torch.float32),
    Case("lra4k-butterfly", "butterfly", 32, 8, 4096, 64),
    Case("pathx-d64-butterfly", "butterfly", 16, 4, 16384, 64),
    Case("pathx-d32-butterfly", "butterfly", 16, 4, 16384, 32),
    Case("path256-butterfly", "butterfly", 2, 4, 65536, 64),
    Case("262k-local", "local", 1, 8, 262144, 64),
    *_windows(128, 16),
    *_windows(64, 32),
)


def select(patterns: str, *, quick: bool) -> list[Case]:
    """The cases whose name matches one of the comma-separated globs; with `quick` the main ones only."""
    globs = [glob.strip() for glob in patterns.split(",")]
    chosen = [case for case in CASES if any(fnmatch(case.name, glob) for glob in globs)]
    chosen = [case for case in chosen if case.main or not quick]
    if not chosen:
        names = ", ".join(case.name for case in CASES if case.main or not quick)
        raise ValueError(f"--cases must match at least one of {names}; got {patterns!r}.")
    return chosen
