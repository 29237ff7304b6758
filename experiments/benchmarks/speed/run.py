"""Ways of computing one attention: ours is compared with fp64, the others with ours, and all are timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks import timing
from experiments.benchmarks.fresh_process import answer_of
from experiments.benchmarks.harness import SAME_FUNCTION, Bench, Unavailable, Way, difference, reason
from experiments.benchmarks.speed.cases import BACKWARD, BOTH, CALL, FIRST, FORWARD, MEMORY, Case, useful_flops
from experiments.benchmarks.speed.patterns import block_mask, pattern
from experiments.benchmarks.speed.peers import PEERS, runner_of
from experiments.benchmarks.speed.peers.runner import Inputs, Runner
from experiments.benchmarks.speed.precision import products_in_tf32
from sparseflash import BlockMask, testing

OURS = "sparseflash"
ALLOWED = "of what is allowed"  # the unit of errors
LIVE_SCORES_IN_FULL = 2**30  # of a head whose rows are all compared with fp64: 0.2 s on an H100
MIB = 2**20
SECONDS = 240.0  # for the first calls of a new process


@dataclass(frozen=True)
class Subject:
    """One attention: its mask and inputs, the functions that make each implementation, ours first, and the passes."""

    path: str
    mask: BlockMask | None
    inputs: Inputs
    makers: Mapping[str, Callable[[], Runner]]
    passes: Sequence[str]
    settings: Mapping[str, Any]
    flops: Mapping[str, float]  # useful ones, by pass
    heads: int = 3  # key heads, with their query heads, that are compared with fp64
    blocks: int | None = None  # block rows and columns that are compared; None: all
    calls: int = 300  # of a turn, where the host's time is measured

    @property
    def has_backward(self) -> bool:
        return any(which in (BACKWARD, BOTH, MEMORY) for which in self.passes)


def subject_of(case: Case, peers: Sequence[str], device: torch.device, seed: int, **options: int) -> Subject:
    """A case of the benchmark, with these peers."""
    live = pattern(case.kind, case.length, case.block).to(device)
    inputs = make_inputs(case, device, seed)
    return Subject(
        case.path, block_mask(case.kind, case.length, case.block).to(device), inputs,
        {name: partial(runner_of, name, case, live, inputs) for name in (OURS, *peers)}, case.passes,
        case.settings | {"live": live.density},
        {which: useful_flops(case, live.kept, which) for which in case.passes if which != MEMORY},
        blocks=None if live.kept <= LIVE_SCORES_IN_FULL else 16, **options,
    )  # fmt: skip


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Normal random q and output gradient [B, H, N, D], k and v [B, heads of keys, N, D]."""
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v, dout = (
        torch.randn(case.batch, heads, case.length, case.head_dim, generator=generator, device=device, dtype=case.dtype)
        for heads in (case.heads, case.heads_of_keys, case.heads_of_keys, case.heads)
    )
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def run_case(bench: Bench, case: Case, peers: Sequence[str], seed: int, heads: int) -> bool:
    """Records one case; returns whether ours was right and was timed."""
    with products_in_tf32(case.tf32 and bench.device.type == "cuda"):
        if set(case.passes) <= set(FIRST):
            return first_calls(bench, case, peers, seed)
        calls = 300 if bench.device.type == "cuda" else 2
        return measure(bench, subject_of(case, peers, bench.device, seed, heads=heads, calls=calls))


def measure(bench: Bench, subject: Subject) -> bool:
    """Records our error and the times of all ways that agree with ours. Returns whether ours was right and was timed.

    A peer that fails, or that computes something else, is recorded with the reason.
    """
    wrong = _exactness(bench, subject)
    expected: dict[int, tuple[Tensor, ...]] = {}  # our results, by their number
    ways: dict[str, Way] = {}
    failed: set[str] = set()

    def fails(which: str, name: str, failure: Exception) -> None:
        if not isinstance(failure, Unavailable):
            failed.add(name)
        unit = {CALL: "us", MEMORY: "MiB"}.get(which, "ms")
        bench.add(f"{subject.path}/{which}/{name}", None, unit, failure=reason(failure), **subject.settings)

    for name, make in subject.makers.items():
        before = torch.cuda.memory_allocated(bench.device) if bench.device.type == "cuda" else 0
        runner: Runner | None = None
        for which in subject.passes:
            try:
                if wrong:
                    raise ValueError(wrong)
                runner = runner or make()
                if which == MEMORY:  # first, while nothing else of the implementation is in memory
                    peak = peak_mib(runner, subject.inputs, before, bench.device)
                found = results(runner, which)
                if name == OURS:
                    expected[len(found)] = found
                elif len(found) not in expected:
                    raise ValueError("there are no results of ours to compare with")
                apart = max(map(difference, found, expected[len(found)]))
                if not apart <= SAME_FUNCTION[found[0].dtype]:
                    raise ValueError(f"differs from ours by {apart:.2g}, relative")
                if which == MEMORY:
                    bench.add(f"{subject.path}/{which}/{name}", peak, "MiB", **subject.settings)
                else:
                    settings = {**subject.settings, "flops": subject.flops[which]}
                    ways[f"{which}/{name}"] = Way(*call_of(runner, which), settings, peer=True)
            except Exception as failure:
                fails(which, name, failure)
    if ways:
        bench.time(subject.path, ways, host_calls=subject.calls if CALL in subject.passes else None)
    bench.save()
    return not wrong and OURS not in failed


def _exactness(bench: Bench, subject: Subject) -> str:
    """Records our largest error; returns the reason why ours must not be timed, if there is one."""
    path, (q, k, v, dout) = f"{subject.path}/exactness/{OURS}", subject.inputs.tensors
    # NaN in freed memory, so that a value that a kernel does not write is noticed.
    freed = [torch.full_like(q, float("nan"), dtype=dtype) for dtype in (q.dtype, torch.float32)]
    del freed
    try:
        error = testing.compare(
            subject.makers[OURS]().call, q, k, v, subject.mask, dout=dout, gradients=subject.has_backward,
            heads=subject.heads, blocks=subject.blocks, every_draw=False,
        ).worst  # fmt: skip
        if not isfinite(error):
            raise ValueError("a result of ours is not finite, or is wrong where it should be exact")
    except Exception as failure:
        bench.add(path, None, ALLOWED, failure=reason(failure))
        return reason(failure)
    bench.add(path, error, ALLOWED)
    return "" if error <= 1 else f"an error of ours is {error:.3g} times what is allowed"


@contextmanager
def inference(runner: Runner) -> Iterator[None]:
    """The runner's context, without gradients."""
    with runner.context(), torch.no_grad():
        yield


def call_of(runner: Runner, which: str) -> tuple[Callable[[], object], Callable[[], Any]]:
    """The call of a pass to time, and its context. A backward runs on a graph that is kept."""
    if which in (FORWARD, CALL):
        return runner.inference(), partial(inference, runner)
    if which == BOTH:
        return runner.step, runner.context
    with runner.context():
        return partial(runner.gradients, runner.forward(), retain_graph=True), runner.context


def results(runner: Runner, which: str) -> tuple[Tensor, ...]:
    """The output; with a backward also the gradients of q, k and v, as [B, H, N, D]."""
    if which in (FORWARD, CALL):
        with inference(runner):
            found = (runner.inference()(),)
    else:
        with runner.context():
            found = runner.step()
    return tuple(runner.to_bhnd(x) for x in found)


def peak_mib(runner: Runner, inputs: Inputs, before: int, device: torch.device) -> float:
    """The peak of a second forward and backward in MiB, with the inputs and all that the implementation keeps.

    before: bytes that were allocated when the runner was not yet built, `inputs` included. Raises Unavailable on a CPU.
    """
    if device.type != "cuda":
        raise Unavailable("PyTorch counts memory on a CUDA device only")
    with runner.context():
        runner.step()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        runner.step()
        torch.cuda.synchronize(device)
    # A peer with its own order of dimensions has copies of the inputs, which then count as the inputs, once.
    given = {tensor.data_ptr(): tensor.nbytes for tensor in inputs.tensors}
    shared = sum(given.get(tensor.data_ptr(), 0) for tensor in runner.inputs.tensors)
    return (torch.cuda.max_memory_allocated(device) - before + shared) / MIB


def first_calls(bench: Bench, case: Case, peers: Sequence[str], seed: int) -> bool:
    """Records the first calls of new processes with empty caches, in seconds. Returns whether ours gave an answer."""
    right = True
    for name in (OURS, *peers):
        seconds: dict[str, float] = {}
        failure = ""
        try:
            if name != OURS:  # whether a peer can serve the case at all needs no new process
                live = pattern(case.kind, case.length, case.block).to(bench.device)
                PEERS[name](case, live, make_inputs(case, bench.device, seed))
            seconds = answer_of(seconds_of, case, name, bench.device, seed, limit=SECONDS)
        except Exception as failed:
            failure, right = reason(failed), right and name != OURS
        for which in case.passes:
            path = f"{case.path}/{which.replace(' ', '-')}/{name}"
            bench.add(path, seconds.get(which), "s", failure=failure, **case.settings)
    bench.save()
    return right


def seconds_of(case: Case, name: str, device: torch.device, seed: int) -> dict[str, float]:
    """Seconds of FIRST in this process: an inference call, then a forward with gradients and its backward."""
    live = pattern(case.kind, case.length, case.block).to(device)
    inputs = make_inputs(case, device, seed)
    # Initialising the device and its libraries is not part of the measurement.
    torch.ones(64, 64, device=device, dtype=case.dtype) @ torch.ones(64, 64, device=device, dtype=case.dtype)
    with products_in_tf32(case.tf32 and device.type == "cuda"):
        runner = runner_of(name, case, live, inputs)
        with inference(runner):
            forward, _ = timing.first_call(runner.inference(), device)
        with runner.context():
            both, _ = timing.first_call(runner.step, device)
    return dict(zip(FIRST, (forward, both)))


def run_all(bench: Bench, todo: Mapping[str, Callable[[], bool]], minutes: float) -> bool:
    """Records subjects by path until the minutes have passed; the others are marked. Returns whether ours was right."""
    begin, right = time.monotonic(), True
    for number, (path, run) in enumerate(todo.items(), 1):
        if time.monotonic() - begin > 60 * minutes:
            bench.add(f"{path}/exactness/{OURS}", None, ALLOWED, failure=f"not run: the limit was {minutes:g} minutes")
            continue
        print(f"[{number}/{len(todo)}] {time.monotonic() - begin:.0f} s  {path}", flush=True)
        try:
            right = run() and right
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
        except Exception as failure:  # of the benchmark itself, or of a device that an earlier case has lost
            bench.add(f"{path}/exactness/{OURS}", None, ALLOWED, failure=reason(failure))
            right = False
    bench.save()
    return right
