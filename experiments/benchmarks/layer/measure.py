"""A case: the steps of all implementations, compared with ours and timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks import timing
from experiments.benchmarks.harness import SAME_FUNCTION, difference
from experiments.benchmarks.layer.model import Layer, compiled
from experiments.benchmarks.speed.candidate import verdict_of
from experiments.benchmarks.speed.cases import Case
from experiments.benchmarks.speed.inputs import Options, make_inputs
from experiments.benchmarks.speed.patterns import pattern
from experiments.benchmarks.speed.peers import PEERS, ours
from experiments.benchmarks.speed.peers.runner import Runner
from experiments.benchmarks.speed.rows import DIFFERS, OK, OURS, SKIPPED


@dataclass
class Row:
    """One case and one implementation. `ratio`: its time over ours; `difference`: from our gradient of the
    projections to q, k and v, relative.
    """

    case: str
    peer: str
    status: str = OK
    reason: str = ""
    ms: float | None = None
    spread: float | None = None
    ratio: float | None = None
    difference: float | None = None
    rounds: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """A forward and a backward pass of a layer, with the gradients of its input and of all weights."""

    layer: Layer
    call: Callable[[Tensor], Tensor]
    x: Tensor
    dout: Tensor

    def __call__(self) -> Tensor:
        """The gradient of the projections to q, k and v [3 * W, W], all of which comes through attention."""
        self.layer.zero_grad(set_to_none=True)
        self.x.grad = None
        self.call(self.x).backward(self.dout)
        found = self.layer.qkv.weight.grad
        assert found is not None
        return found


def step_of(name: str, runner: Runner, case: Case, device: torch.device, seed: int) -> Step:
    """The step with this implementation's attention; weights and inputs depend on the case and the seed alone."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Exchanging tokens and heads, or doing nothing, undoes itself, so `to_bhnd` leads to a peer's order as well.
        # The context chooses SDPA's backend while a graph is traced. Entered outside of the graph it would not be seen
        # by Dynamo, which would give the second of two backends the graph of the first.
        with runner.context():
            return runner.to_bhnd(runner.call(*map(runner.to_bhnd, (q, k, v))))

    torch.manual_seed(seed)
    with device:
        layer = Layer(case.heads, case.head_dim, attend).to(case.dtype)
        shape = case.batch, case.length, case.heads * case.head_dim
        x, dout = (torch.randn(shape, dtype=case.dtype) for _ in range(2))
    return Step(layer, compiled(layer, name), x.requires_grad_(), dout)


def run_case(case: Case, peers: Sequence[str], options: Options) -> list[Row]:
    """The rows of a case, ours first. One that fails, or whose gradients are not ours, is not timed."""
    live = pattern(case.kind, case.length, case.block).to(options.device)
    inputs = make_inputs(case, options)
    rows = {name: Row(case.name, name) for name in (OURS, *peers)}
    timed: dict[str, timing.Timed] = {}
    expected: Tensor | None = None
    for name, row in rows.items():
        try:
            runner = (ours if name == OURS else PEERS[name])(case, live, inputs)
            step = step_of(name, runner, case, options.device, options.seed)
            found = step().clone()
        except Exception as failure:
            row.status, row.reason = verdict_of(failure)
            continue
        if expected is None and name == OURS:
            expected = found
        if expected is not None:
            row.difference = difference(found, expected)
            if not row.difference <= SAME_FUNCTION[case.dtype]:
                row.status = DIFFERS
                continue
        timed[name] = timing.Timed(step, nullcontext)
    found_times = timing.in_turns(timed, options.device, rounds=options.rounds, round_ms=options.round_ms)
    for name, measured in found_times.items():
        row = rows[name]
        if measured.failure is not None:
            row.status, row.reason = verdict_of(measured.failure)
            continue
        row.ms, row.spread, row.rounds = measured.ms, measured.spread, measured.rounds
        if OURS in found_times and found_times[OURS].failure is None:
            row.ratio = measured.ms / found_times[OURS].ms
    return list(rows.values())


def table(rows: Sequence[Row], cases: Sequence[Case]) -> str:
    """A Markdown table: a line for each case, the milliseconds of ours and the others' time over it."""
    peers = list(dict.fromkeys(row.peer for row in rows if row.peer != OURS))
    found: dict[tuple[str, str], Row] = {(row.case, row.peer): row for row in rows}
    lines = [f"| mask | head dim | ours, ms | {' | '.join(peers)} |", "|---|" + "---:|" * (2 + len(peers))]
    for case in cases:
        if (case.name, OURS) not in found:
            continue
        cells: list[Any] = [case.kind, case.head_dim, _cell(found[case.name, OURS], "ms", "{:.2f}")]
        cells += [_cell(found[case.name, peer], "ratio", "{:.2f}") for peer in peers]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _cell(row: Row, value: str, form: str) -> str:
    number = getattr(row, value)
    if number is not None:
        return form.format(number)
    return "-" if row.status == SKIPPED else row.status
