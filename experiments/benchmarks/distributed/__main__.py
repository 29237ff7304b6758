from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from experiments.benchmarks.distributed import measure as measurement
from experiments.benchmarks.distributed.ways import PATTERNS, WAYS
from experiments.benchmarks.harness import Bench, Commit, Device, Out, chosen

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Attention over several ranks."""


@app.command()
def measure(
    pattern: Annotated[list[str] | None, typer.Option(help="May be repeated.", show_default="all")] = None,
    tokens: Annotated[int, typer.Option(help="Of the whole sequence.")] = 131072,
    heads: Annotated[list[str] | None, typer.Option(help="Queries' and keys'.", show_default="16:16, 32:8")] = None,
    dim: Annotated[int, typer.Option(help="Head dim.")] = 128,
    way: Annotated[list[str] | None, typer.Option(help="May be repeated.", show_default="all")] = None,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = Path("runs/distributed/measured.jsonl"),
) -> None:
    """Time a forward pass, and a forward and a backward pass, in the processes that torchrun started.

    Ways: one rank; keys that travel before attention (0 stages) or in stages; queries; heads (all-to-all); all-gather;
    PyTorch's context_parallel (dense and causal, on GPUs). First one rank is compared with fp64, the others with it.
    """
    patterns, ways = chosen("--pattern", pattern, PATTERNS), chosen("--way", way, WAYS)
    if "LOCAL_RANK" not in os.environ:
        raise typer.BadParameter(
            "torchrun must start the processes: torchrun --nproc-per-node 2 -m experiments.benchmarks.distributed "
            "measure"
        )
    program = "torchrun", "--nproc-per-node", os.environ["WORLD_SIZE"]
    bench = Bench.start("distributed", device, commit, out, program=program)
    measurement.measure(bench, patterns, tokens, heads or ["16:16", "32:8"], dim, ways)


if __name__ == "__main__":
    app()
