"""The first calls of a new process with empty caches, including imports and compilation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch

from experiments.benchmarks.fresh_process import answer_of
from experiments.benchmarks.speed.candidate import Candidate, compare, prepare, verify
from experiments.benchmarks.speed.cases import BACKWARD, FIRST, FORWARD, Case
from experiments.benchmarks.speed.check import checked_heads
from experiments.benchmarks.speed.inputs import Options, make_inputs
from experiments.benchmarks.speed.patterns import pattern
from experiments.benchmarks.speed.precision import products_in_tf32
from experiments.benchmarks.speed.rows import FAILED, OK, OURS

PASS_OF = dict(zip(FIRST, (FORWARD, BACKWARD)))
SECONDS = 240.0


@dataclass(frozen=True)
class Answer:
    """The values that a row of a first call needs. `seconds` of FIRST_BACKWARD is the time of a forward with gradients
    and its backward, after the inference call of FIRST_FORWARD.
    """

    status: str
    reason: str = ""
    seconds: float | None = None
    error: float | None = None
    difference: float | None = None
    checked: str = ""


def in_new_process(case: Case, name: str, options: Options, *, limit: float = SECONDS) -> list[Answer]:
    """The answers of `case.passes`, each one of FIRST, for the implementation `name`: OURS or one of PEERS."""
    try:
        return [Answer(**answer) for answer in answer_of(measured, case, name, options, limit=limit)]
    except RuntimeError as failure:
        return [Answer(FAILED, str(failure)) for _ in case.passes]


def answers(case: Case, name: str, options: Options) -> list[Answer]:
    """The first calls of `name` in this process, and after them ours, to compare the results."""
    from experiments.benchmarks.speed.peers import PEERS, ours

    device = options.device
    live = pattern(case.kind, case.length, case.block).to(device)
    inputs = make_inputs(case, options)
    # Initialising the device and its libraries is not part of the measurement.
    torch.ones(64, 64, device=device, dtype=case.dtype) @ torch.ones(64, 64, device=device, dtype=case.dtype)
    passes = tuple(PASS_OF[way] for way in case.passes)
    asked = replace(case, passes=passes)
    candidate = prepare(name, ours if name == OURS else PEERS[name], asked, live, inputs, device)
    verified = candidate if name == OURS else prepare(OURS, ours, asked, live, inputs, device)
    verify(verified, inputs, live, checked_heads(case.batch, case.heads_of_keys, options.heads, options.seed))
    if candidate is not verified:
        compare(candidate, verified, case.dtype)
    return [_answer(candidate, way) for way in passes]


def _answer(candidate: Candidate, way: str) -> Answer:
    status, reason = candidate.verdicts.get(way, (OK, ""))
    seconds = candidate.first_call_s.get(way) if status == OK else None
    error, difference = candidate.errors.get(way), candidate.differences.get(way)
    return Answer(status, reason, seconds, error, difference, candidate.checked)


def measured(case: Case, name: str, options: Options) -> list[dict[str, object]]:
    """The answers as plain values, in this process."""
    with products_in_tf32(case.tf32 and options.device.type == "cuda"):
        return [asdict(answer) for answer in answers(case, name, options)]
