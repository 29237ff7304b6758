from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from experiments.benchmarks.harness import Bench, Cases, Commit, Device, Minutes, Out, Seed, chosen, deadline, separated
from experiments.benchmarks.speed.cases import CASES, GROUPS, Case, select
from experiments.benchmarks.speed.peers import DEFAULT_PEERS, PEERS, named
from experiments.benchmarks.speed.run import run_all, run_case
from sparseflash.blockmask.arguments import BLOCKS

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

QUICK_MINUTES = 3.0  # in which the last case ends


def _sized(case: Case, length: int | None, block: int | None, device: torch.device) -> Case:
    if length is None and device.type != "cpu":
        return case
    most = 32 if device.type == "cpu" else case.block
    return case.shrunk(length or 256, block or min(case.block, most))


@app.command(epilog="Several commands in a limited time: see experiments/benchmarks/speed/README.md.")
def main(
    group: Annotated[list[str] | None, typer.Option(help=", ".join(GROUPS), show_default="all but workloads")] = None,
    cases: Cases = "*",
    list_: Annotated[bool, typer.Option("--list", help="Print the groups and their cases, and stop.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Six masks at D=64 and D=128, in three minutes.")] = False,
    peers: Annotated[str | None, typer.Option(help=f"{', '.join(PEERS)}; or none.", show_default="most")] = None,
    out: Out = Path("runs/speed"),
    device: Device = "cuda",
    length: Annotated[int | None, typer.Option(help="Tokens, with two heads.", show_default="the case's")] = None,
    block: Annotated[int | None, typer.Option(help="Tokens a tile, with --length.", show_default="the case's")] = None,
    check_heads: Annotated[int, typer.Option(help="Heads whose outputs and gradients are compared with fp64.")] = 3,
    minutes: Minutes = None,
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Time sparseflash beside its peers, after checking that it is right.

    Forward is without gradients, both is one call of forward and backward. TFLOP/s are useful ones: dead scores count
    nothing. exactness: our largest error against fp64, output and gradients, in units of the allowed error. Ends with
    1 if ours was wrong or failed somewhere, with 2 for options that cannot be served.
    """
    if list_:
        for name, question in GROUPS.items():
            print(f"{name}: {question}\n    {', '.join(case.name for case in CASES if case.group == name)}")
        return
    if block is not None:
        chosen("--block", [block], BLOCKS)
    names = named(peers) if peers is not None else DEFAULT_PEERS["cpu" if device == "cpu" else "cuda"]
    found = select(cases, groups=separated(*(group or ())), quick=quick)
    bench = Bench.start(
        "speed", device, commit, out, seed=seed, packages=("nvidia-cudnn-frontend",),
        rounds=1 if device == "cpu" else 2 if quick else 3, round_ms=40.0 if quick else 60.0,
    )  # fmt: skip
    sized = [_sized(case, length, block, bench.device) for case in found]
    todo = {case.path: partial(run_case, bench, case, names, seed, check_heads) for case in sized}
    right = run_all(bench, todo, deadline(QUICK_MINUTES if quick and minutes is None else minutes))
    bench.finish()
    if not right:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
