"""Ways of computing one attention: ours is compared with fp64, the others with ours, and all are timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.harness import SAME_FUNCTION, Bench, Unavailable, Way, difference, reason
from experiments.benchmarks.speed.cases import BOTH, FORWARD, MEMORY, Case, useful_flops
from experiments.benchmarks.speed.patterns import Pattern, pattern
from experiments.benchmarks.speed.peers import runner_of
from experiments.benchmarks.speed.peers.runner import Inputs, Runner
from experiments.benchmarks.speed.precision import products_in_tf32
from sparseflash import testing

OURS = "sparseflash"
ALLOWED = "of what is allowed"
LIVE_SCORES_IN_FULL = 2**30  # of a head that is compared whole: 0.2 s on an H100
MIB = 2**20


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    kv_heads, v_dim = case.heads_of_keys, case.v_dim or case.head_dim
    q, k, v, dout = (
        torch.randn(case.batch, *shape, generator=generator, device=device, dtype=case.dtype)
        for shape in (
            (case.heads, case.length, case.head_dim), (kv_heads, case.k_len, case.head_dim),
            (kv_heads, case.k_len, v_dim), (case.heads, case.length, v_dim),
        )
    )  # fmt: skip
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def run_case(bench: Bench, case: Case, peers: Sequence[str], seed: int, heads: int) -> bool:
    """Records our error and the times of all ways that agree with ours, or why not. Returns whether ours was right and
    was timed. heads: of keys, compared with fp64."""
    with products_in_tf32(case.tf32 and bench.device.type == "cuda"):
        return _run_case(bench, case, peers, seed, heads)


def _run_case(bench: Bench, case: Case, peers: Sequence[str], seed: int, heads: int) -> bool:
    live, inputs = pattern(case, bench.device), make_inputs(case, bench.device, seed)
    settings = case.settings | {"live": live.mask.density}
    wrong = _exactness(bench, case, live, inputs, heads)
    expected: dict[int, tuple[Tensor, ...]] = {}  # ours, by their number
    ways: dict[str, Way] = {}
    right = not wrong
    for name in (OURS, *peers):
        before = torch.cuda.memory_allocated(bench.device) if bench.device.type == "cuda" else 0
        runner: Runner | None = None
        for which in case.passes:
            try:
                if wrong:
                    raise ValueError(wrong)
                runner = runner or runner_of(name, case, live, inputs)
                if which == MEMORY:  # first, while nothing else is in memory
                    peak = peak_mib(runner, inputs, before, bench.device)
                found = results(runner, which)
                if name == OURS:
                    expected[len(found)] = found
                elif len(found) not in expected:
                    raise ValueError("there are no results of ours to compare with")
                apart = max(map(difference, found, expected[len(found)]))
                if not apart <= SAME_FUNCTION[case.dtype]:
                    raise ValueError(f"differs from ours by {apart:.2g}, relative")
                if which == MEMORY:
                    bench.add(f"{case.path}/{which}/{name}", peak, "MiB", **settings)
                else:
                    of_pass = settings | {"flops": useful_flops(case, live.kept, which)}
                    ways[f"{which}/{name}"] = Way(*call_of(runner, which), of_pass, peer=True)
            except Exception as failure:
                right = right and (name != OURS or isinstance(failure, Unavailable))
                unit = "MiB" if which == MEMORY else "ms"
                bench.add(f"{case.path}/{which}/{name}", None, unit, failure=reason(failure), **settings)
    if ways:
        bench.time(case.path, ways)
    bench.save()
    return right


def _exactness(bench: Bench, case: Case, live: Pattern, inputs: Inputs, heads: int) -> str:
    path, (q, k, v, dout) = f"{case.path}/exactness/{OURS}", inputs.tensors
    # A value that a kernel does not write is then noticed.
    freed = [torch.full_like(q, float("nan"), dtype=dtype) for dtype in (q.dtype, torch.float32)]
    del freed
    try:
        error = testing.compare(
            runner_of(OURS, case, live, inputs).call, q, k, v, live.mask, dout=dout,
            gradients=set(case.passes) != {FORWARD}, heads=heads,
            blocks=None if live.kept <= LIVE_SCORES_IN_FULL else 16, every_draw=False,
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
    with runner.context(), torch.no_grad():
        yield


def call_of(runner: Runner, which: str) -> tuple[Callable[[], object], Callable[[], Any]]:
    if which == FORWARD:
        return runner.inference(), partial(inference, runner)
    if which == BOTH:
        return runner.step, runner.context
    with runner.context():
        return partial(runner.gradients, runner.forward(), retain_graph=True), runner.context


def results(runner: Runner, which: str) -> tuple[Tensor, ...]:
    if which == FORWARD:
        with inference(runner):
            found = (runner.inference()(),)
    else:
        with runner.context():
            found = runner.step()
    return tuple(runner.to_bhnd(x) for x in found)


def peak_mib(runner: Runner, inputs: Inputs, before: int, device: torch.device) -> float:
    """before: bytes that were allocated when the runner was not yet built, `inputs` included."""
    if device.type != "cuda":
        raise Unavailable("PyTorch counts memory on a CUDA device only")
    with runner.context():
        runner.step()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        runner.step()
        torch.cuda.synchronize(device)
    # Copies of the inputs in a peer's own order count once, as the inputs.
    given = {tensor.data_ptr(): tensor.nbytes for tensor in inputs.tensors}
    shared = sum(given.get(tensor.data_ptr(), 0) for tensor in runner.inputs.tensors)
    return (torch.cuda.max_memory_allocated(device) - before + shared) / MIB


def run_all(bench: Bench, todo: Mapping[str, Callable[[], bool]], late: Callable[[], bool]) -> bool:
    begin, right = time.monotonic(), True
    for number, (path, run) in enumerate(todo.items(), 1):
        if late():
            bench.add(f"{path}/exactness/{OURS}", None, ALLOWED, failure="not run: out of time")
            continue
        print(f"[{number}/{len(todo)}] {time.monotonic() - begin:.0f} s  {path}", flush=True)
        try:
            right = run() and right
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
        except Exception as failure:
            bench.add(f"{path}/exactness/{OURS}", None, ALLOWED, failure=reason(failure))
            right = False
    bench.save()
    return right
