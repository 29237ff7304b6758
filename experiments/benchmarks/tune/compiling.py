"""Compiles candidates on all cores, without a GPU, and drops those that are not worth timing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import as_completed
from typing import NamedTuple

from experiments.benchmarks.compile.report import Report, compile_all
from experiments.benchmarks.tune.space import Target
from experiments.training.workers import available_cores, worker_pool
from sparseflash.backends.triton.configs import Config

# Spills outside the loop over full tiles, because registers are limited; times show the effect.
_SPILLED_FOR_A_PROGRAM = 180
_COMPILED = {"half": "bfloat16", "tf32": "tf32", "fp32": "float32"}


class Compiled(NamedTuple):
    target: Target
    config: Config
    report: Report | None  # None: does not compile
    why: str  # empty if it may be timed


def compile_candidates(
    targets: dict[Target, list[Config]],
    arch: int,
    shared_limit: int,
    *,
    spills: bool = False,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Compiled]:
    """All candidates, in their order. `spills`: keep those that spill or serialise."""
    wanted = [(target, config) for target, configs in targets.items() for config in configs]
    found: dict[tuple[Target, Config], Compiled] = {}
    with worker_pool(workers or available_cores()) as pool:
        running = [pool.submit(compile_one, *each, arch, shared_limit, spills) for each in wanted]
        for done, future in enumerate(as_completed(running), start=1):
            result = future.result()
            found[result.target, result.config] = result
            progress(done)
    return [found[each] for each in wanted]


def compile_one(target: Target, config: Config, arch: int, shared_limit: int, spills: bool = False) -> Compiled:
    if config.q_in_registers and (target.arithmetic == "fp32" or target.kernel != "forward"):
        return Compiled(target, config, None, "only a forward that reads no pieces can have its queries in registers")
    try:
        reports = compile_all(
            arch, _COMPILED[target.arithmetic], target.dim, descriptors=target.descriptors, only=target.kernel,
            config=config, assemble=True,
        )  # fmt: skip
    except Exception as error:
        return Compiled(target, config, None, f"does not compile: {str(error).splitlines()[0][:120] or type(error)}")
    report = reports[-1]  # of the two forms of dq in fp32, the one that writes dq
    spilled = max(each.spilled for each in reports)
    shared = max(each.shared for each in reports)
    if report.descriptors != target.descriptors:
        return Compiled(target, config, report, "the launcher takes no descriptors here")
    if any(each.stages < config.num_stages for each in reports):
        return Compiled(target, config, report, "its number of stages does not fit in shared memory")
    if shared > shared_limit:
        return Compiled(target, config, report, f"{shared} bytes of shared memory")
    if spills:
        return Compiled(target, config, report, "")
    # For wide heads, pieces and results fill the registers; times show what that costs.
    if target.arithmetic != "fp32" and spilled > (_SPILLED_FOR_A_PROGRAM if config.registers else 0):
        return Compiled(target, config, report, f"spills {spilled} bytes")
    if any(each.serialised for each in reports):
        return Compiled(target, config, report, "its matrix instructions wait for one another")
    return Compiled(target, config, report, "")
