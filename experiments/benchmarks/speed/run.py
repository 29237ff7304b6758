"""A case from inputs to rows: check ours, then time ours and its peers in turns on the same inputs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from experiments.benchmarks import timing
from experiments.benchmarks.speed import first_call
from experiments.benchmarks.speed.candidate import Candidate, compare, inference, prepare, verify
from experiments.benchmarks.speed.cases import BACKWARD, BOTH, CALL, FIRST, MEMORY, Case, useful_flops
from experiments.benchmarks.speed.check import checked_heads
from experiments.benchmarks.speed.inputs import Options, make_inputs
from experiments.benchmarks.speed.patterns import Pattern, pattern
from experiments.benchmarks.speed.peers.runner import Peer
from experiments.benchmarks.speed.precision import products_in_tf32
from experiments.benchmarks.speed.rows import NOT_RUN, OK, OURS, SKIPPED, Row


def _time(candidates: Mapping[str, Candidate], direction: str, options: Options) -> dict[str, timing.Timing]:
    calls: dict[str, timing.Timed] = {}
    for name, candidate in candidates.items():
        runner = candidate.runner
        if runner is None or candidate.status(direction) != OK:
            continue
        if direction == BACKWARD:
            assert candidate.backward is not None
            calls[name] = timing.Timed(candidate.backward, runner.context)
        elif direction == BOTH:
            calls[name] = timing.Timed(runner.step, runner.context)
        else:
            calls[name] = timing.Timed(runner.inference(), partial(inference, runner))
    if direction == CALL:
        return timing.of_single_calls(calls, options.device, rounds=options.rounds, count=options.calls)
    return timing.in_turns(calls, options.device, rounds=options.rounds, round_ms=options.round_ms)


def run_case(case: Case, ours: Peer, peers: Mapping[str, Peer], options: Options) -> list[Row]:
    """The rows of one case. A pass in which ours fails or is wrong is not timed, not for peers either."""
    with products_in_tf32(case.tf32 and options.device.type == "cuda"):
        if set(case.passes) <= set(FIRST):
            return _first_calls(case, peers, options)
        return _run_case(case, ours, peers, options)


def _run_case(case: Case, ours: Peer, peers: Mapping[str, Peer], options: Options) -> list[Row]:
    live = pattern(case.kind, case.length, case.block).to(options.device)
    inputs = make_inputs(case, options)
    first = prepare(OURS, ours, case, live, inputs, options.device)
    verify(first, inputs, live, checked_heads(case.batch, case.heads_of_keys, options.heads, options.seed))
    candidates = {OURS: first}
    if any(first.status(direction) == OK for direction in case.passes):
        for name, peer in peers.items():
            candidates[name] = prepare(name, peer, case, live, inputs, options.device)
            compare(candidates[name], first, case.dtype)
            candidates[name].results = {}
    first.results = {}
    rows = []
    for direction in case.passes:
        right = first.status(direction) == OK
        timings = _time(candidates, direction, options) if right and direction != MEMORY else {}
        for name, candidate in candidates.items():
            measured = timings.get(name)
            if measured is not None and measured.failure is not None:
                candidate.fail(measured.failure, direction)
            if right or name == OURS:
                rows.append(_row(case, live, direction, candidate, measured, timings.get(OURS)))
    return rows


def _row(
    case: Case,
    live: Pattern,
    direction: str,
    candidate: Candidate,
    measured: timing.Timing | None,
    ours: timing.Timing | None,
) -> Row:
    status, reason = candidate.verdicts.get(direction, (OK, ""))
    row = Row(
        case,
        candidate.name,
        direction,
        status,
        density=live.density,
        first_call_s=candidate.first_call_s.get(direction),
        error=candidate.errors.get(direction),
        difference=candidate.differences.get(direction),
        checked=candidate.checked,
        reason=reason,
    )
    if direction == MEMORY and status == OK:
        row.memory_mib = candidate.memory_mib
    if measured is not None and measured.failure is None:
        row.ms, row.spread = measured.ms, measured.spread
        row.flops = useful_flops(case, live.kept, direction)
        if candidate.name != OURS and ours is not None and ours.failure is None:
            row.ratio = measured.ms / ours.ms
    return row


def _first_calls(case: Case, peers: Mapping[str, Peer], options: Options) -> list[Row]:
    """The rows of the first calls, each implementation in a new process."""
    live = pattern(case.kind, case.length, case.block).to(options.device)
    inputs = make_inputs(case, options)
    rows: list[Row] = []
    first: dict[str, float] = {}
    for name in (OURS, *peers):
        try:
            if name != OURS:
                peers[name](case, live, inputs)  # whether it can serve the case at all needs no new process
            answers = first_call.in_new_process(case, name, options)
        except Exception as failure:
            refused = Candidate(case, name)
            refused.fail(failure, *case.passes)
            answers = [first_call.Answer(*refused.verdicts[way]) for way in case.passes]
        for way, answer in zip(case.passes, answers):
            if name == OURS and answer.seconds is not None:
                first[way] = answer.seconds
            elif way not in first and name != OURS:
                continue  # ours is wrong or failed, so nothing is compared with it
            row = Row(case, name, way, answer.status, live.density, first_call_s=answer.seconds, reason=answer.reason)
            row.error, row.difference, row.checked = answer.error, answer.difference, answer.checked
            if answer.seconds is not None:
                row.ms = answer.seconds * 1e3
                row.ratio = None if name == OURS else answer.seconds / first[way]
            rows.append(row)
    return rows


def _progress(rows: Sequence[Row]) -> str:
    """A case on one line: the implementation, then pass after pass."""
    parts: dict[str, list[str]] = {}
    for row in rows:
        value = row.status if row.ms is None else f"{row.ms:.3f} ms"
        if row.memory_mib is not None:
            value = f"{row.memory_mib:.0f} MiB"
        if row.ratio is not None:
            value = f"x{row.ratio:.2f}"
        if row.error is not None:
            value += f" error {row.error:.2f}"
        if row.status != SKIPPED:
            parts.setdefault(row.peer, []).append(f"{row.direction} {value}" if row.peer == OURS else value)
    return "; ".join(f"{peer} {', '.join(values)}" for peer, values in parts.items()) or "skipped"


def _release(device: torch.device) -> str:
    """Frees cached memory. Returns a reason if the device cannot continue, as after an illegal access by a kernel."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except Exception as failure:
            print(failure, file=sys.stderr, flush=True)
            return "the device was lost in an earlier case"
    return ""


def run_cases(
    cases: Sequence[Case],
    ours: Peer,
    peers: Mapping[str, Peer],
    options: Options,
    *,
    minutes: float = float("inf"),
    done: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """All rows. `done` receives the rows of each case; no case begins after `minutes` minutes."""
    begin = time.monotonic()
    rows: list[Row] = []
    lost = ""
    for number, case in enumerate(cases, 1):
        begin_case = time.monotonic()
        late = f"the limit of {minutes:g} minutes was reached" if begin_case - begin > 60 * minutes else ""
        if lost or late:
            new = [Row(case, OURS, direction, NOT_RUN, reason=lost or late) for direction in case.passes]
        else:
            try:
                new = run_case(case, ours, peers, options)
            except Exception as failure:  # a failure of the benchmark itself, such as too little memory for the check
                broken = Candidate(case, OURS)
                broken.fail(failure, *case.passes)
                verdicts = broken.verdicts.items()
                new = [Row(case, OURS, way, status, reason=reason) for way, (status, reason) in verdicts]
            lost = _release(options.device)
        rows += new
        now = time.monotonic()
        took = f"({now - begin_case:.1f} s)"
        print(
            f"[{number:2}/{len(cases)}] {now - begin:4.0f} s  {case.name}: {_progress(new)} {took}",
            flush=True,
        )
        done(new)
    return rows
