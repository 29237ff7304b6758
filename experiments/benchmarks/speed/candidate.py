"""An implementation before it is timed: it is built, run once and judged, each pass separately."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf, isnan

import torch
from torch import Tensor

from experiments.benchmarks import timing
from experiments.benchmarks.harness import SAME_FUNCTION, Unavailable, difference, reason
from experiments.benchmarks.speed import check, memory
from experiments.benchmarks.speed.cases import BACKWARD, BOTH, CALL, FORWARD, MEMORY, Case
from experiments.benchmarks.speed.patterns import Pattern
from experiments.benchmarks.speed.peers.runner import Inputs, Peer, Runner
from experiments.benchmarks.speed.rows import DIFFERS, FAILED, OK, SKIPPED, WRONG

# The results that must be right for a pass to be timed: the output of a call without gradients, or output and gradients
# of a call with them.
RESULTS_OF_PASS = {
    FORWARD: ("inference",),
    CALL: ("inference",),
    BACKWARD: check.NAMES,
    BOTH: check.NAMES,
    MEMORY: check.NAMES,
}
WITH_GRADIENTS = (BACKWARD, BOTH, MEMORY)


_SHOWN: set[tuple[str, str]] = set()


def verdict_of(failure: Exception) -> tuple[str, str]:
    """`(status, reason)`: SKIPPED in the words of a peer that cannot serve a case, otherwise FAILED with the first line
    of the failure.
    """
    return (SKIPPED, str(failure)) if isinstance(failure, Unavailable) else (FAILED, reason(failure))


@dataclass
class Candidate:
    """One implementation in one case. A pass without an entry in `verdicts` is OK."""

    case: Case
    name: str
    runner: Runner | None = None
    backward: Callable[[], object] | None = None  # on a retained graph
    results: dict[str, Tensor] = field(default_factory=dict)  # [B, H, N, D]
    first_call_s: dict[str, float] = field(default_factory=dict)  # seconds, by pass
    verdicts: dict[str, tuple[str, str]] = field(default_factory=dict)  # status and reason, by pass
    errors: dict[str, float] = field(default_factory=dict)  # in units of the yardstick, by pass
    differences: dict[str, float] = field(default_factory=dict)  # from ours, relative, by pass
    memory_mib: float | None = None
    checked: str = ""

    def status(self, direction: str) -> str:
        """OK while the pass may be timed."""
        return self.verdicts.get(direction, (OK, ""))[0]

    def fail(self, failure: Exception, *passes: str) -> None:
        """Marks the passes as failed, with the first line of the failure; the end of its traceback goes to the error
        stream.
        """
        verdict = verdict_of(failure)
        if verdict[0] == FAILED and (self.name, verdict[1]) not in _SHOWN:  # a peer may refuse many for one reason
            _SHOWN.add((self.name, verdict[1]))
            trace = "".join(traceback.format_exception(type(failure), failure, failure.__traceback__))
            print(f"{self.case.name}, {self.name} {passes}:\n{trace[-1500:]}", file=sys.stderr, flush=True)
        self.verdicts.update(dict.fromkeys(passes, verdict))


@contextmanager
def inference(runner: Runner) -> Iterator[None]:
    """The runner's context, without gradients."""
    with runner.context(), torch.no_grad():
        yield


def _run_without_gradients(candidate: Candidate, runner: Runner, direction: str, device: torch.device) -> None:
    with inference(runner):
        seconds, out = timing.first_call(runner.inference(), device)
    candidate.first_call_s[direction] = seconds
    candidate.results["inference"] = runner.to_bhnd(out)


def _run_with_gradients(candidate: Candidate, runner: Runner, passes: list[str], device: torch.device) -> None:
    with runner.context():
        forward_s, out = timing.first_call(runner.forward, device)
        gradients = partial(runner.gradients, out, retain_graph=True)
        backward_s, found = timing.first_call(gradients, device)
    # Both times count, because torch.compile may compile the backward when the forward runs or when the backward does.
    candidate.first_call_s.update(dict.fromkeys(passes, forward_s + backward_s))
    if BACKWARD in passes:
        candidate.backward = gradients
    results = zip(check.NAMES, (out.detach(), *found))
    candidate.results.update({name: runner.to_bhnd(tensor) for name, tensor in results})


def prepare(name: str, peer: Peer, case: Case, live: Pattern, inputs: Inputs, device: torch.device) -> Candidate:
    """Builds the implementation and runs each pass once, which compiles it; keeps the results and the graph."""
    candidate = Candidate(case, name)
    before = memory.allocated(device)
    try:
        runner = candidate.runner = peer(case, live, inputs)
    except Exception as failure:
        candidate.fail(failure, *case.passes)
        return candidate
    with_gradients = [way for way in case.passes if way in WITH_GRADIENTS]
    if MEMORY in with_gradients:  # measured first, while nothing else of the candidate is in memory
        try:
            candidate.memory_mib = memory.peak_mib(runner, inputs, before, device)
        except Exception as failure:
            candidate.fail(failure, MEMORY)
            with_gradients.remove(MEMORY)
    for direction in [way for way in case.passes if way not in WITH_GRADIENTS]:
        try:
            check.poison(inputs.q, 2)
            _run_without_gradients(candidate, runner, direction, device)
        except Exception as failure:
            candidate.fail(failure, direction)
    if with_gradients:
        try:
            check.poison(inputs.q, 2)
            _run_with_gradients(candidate, runner, with_gradients, device)
        except Exception as failure:
            candidate.fail(failure, *with_gradients)
    return candidate


def _worst(values: Mapping[str, float], names: tuple[str, ...]) -> str:
    """The name of the largest value, where NaN counts as largest."""
    return max(names, key=lambda name: inf if isnan(values[name]) else values[name])


def verify(candidate: Candidate, inputs: Inputs, live: Pattern, heads: list[tuple[int, int]]) -> None:
    """Compares the results with fp64 on `heads`. A pass whose error exceeds the yardstick is WRONG."""
    if not candidate.results:
        return
    part = check.part(live)
    ratios = check.error_ratios(candidate.results, inputs, live, heads, part)
    candidate.checked = f"{len(heads)} of {inputs.k.shape[0] * inputs.k.shape[1]} heads {part}"
    for direction in candidate.case.passes:
        if candidate.status(direction) != OK:
            continue
        name = _worst(ratios, RESULTS_OF_PASS[direction])
        candidate.errors[direction] = ratios[name]
        if not ratios[name] <= 1:
            candidate.verdicts[direction] = (WRONG, f"the error of {name} is {ratios[name]:.3g} times the yardstick")


def compare(candidate: Candidate, ours: Candidate, dtype: torch.dtype) -> None:
    """Compares a peer's results with ours, which were verified. A pass whose results differ is marked DIFFERS."""
    for direction in candidate.case.passes:
        if candidate.status(direction) != OK or ours.status(direction) != OK:
            continue
        names = RESULTS_OF_PASS[direction]
        values = {name: difference(candidate.results[name], ours.results[name]) for name in names}
        name = _worst(values, names)
        candidate.differences[direction] = values[name]
        if not values[name] <= SAME_FUNCTION[dtype]:
            candidate.verdicts[direction] = (DIFFERS, f"{name} differs from ours by {values[name]:.2g}, relative")
