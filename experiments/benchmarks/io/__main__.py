"""`python -m experiments.benchmarks.io`: operations, bytes and milliseconds of attention.

The paper (Dao et al., 2022, figure 2; N=1024, D=64, 16 heads, batch 64, forward and backward, A100): standard attention
66.6 GFLOPs, 40.3 GB, 41.7 ms; FlashAttention 75.2 GFLOPs, 4.4 GB, 7.3 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from experiments.benchmarks.harness import Bench, Commit, Device, Out, Way
from experiments.benchmarks.io.cases import DENSE, Case, calls_of, every_density, largest_difference, of_words
from experiments.benchmarks.io.counters import NoCountersError, counted
from experiments.benchmarks.io.model import cost

app = typer.Typer(
    help="What attention costs: operations, bytes, milliseconds; the FlashAttention paper's figure 2.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Block = Annotated[int, typer.Option(help="Tokens a tile of the mask: the smaller, the lower densities go.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
Counters = Annotated[bool, typer.Option(help="Count bytes by ncu where it is installed; seconds a case.")]


@app.command()
def table(
    batch: Annotated[int, typer.Option(min=1)] = 64,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    length: Annotated[int, typer.Option(help="Tokens.", min=16)] = 1024,
    dim: Annotated[int, typer.Option(help="Head dim.", min=16, max=256)] = 64,
    block: Block = 64,
    dtype: Dtype = "bfloat16",
    counters: Counters = True,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = Path("runs/io/table.jsonl"),
) -> None:
    """Standard attention, ours dense and ours butterfly at every density, at one shape, by default the paper's."""
    run("paper", [_case(batch, heads, length, dim, block, dtype)], counters, device, commit, out)


@app.command()
def theorem(
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    length: Annotated[int, typer.Option(help="Tokens.", min=16)] = 16384,
    dim: Annotated[
        list[int] | None, typer.Option(help="Head dim; may be repeated.", show_default="32, 64, 128")
    ] = None,
    block: Block = 128,
    dtype: Dtype = "bfloat16",
    counters: Counters = True,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = Path("runs/io/theorem.jsonl"),
) -> None:
    """Bytes over density and head dim beside the IO theorem's, at a size that the cache cannot hold."""
    shapes = [_case(batch, heads, length, each, block, dtype) for each in dim or (32, 64, 128)]
    run("theorem", shapes, counters, device, commit, out)


@app.command(hidden=True, context_settings={"ignore_unknown_options": True})
def one(passes: str, words: list[str]) -> None:
    """Runs one case, so that ncu sees its kernels and no others."""
    call = getattr(calls_of(of_words(words), torch.device("cuda")), passes)
    for _ in range(2):
        call()  # compiles and plans
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _case(batch: int, heads: int, length: int, dim: int, block: int, dtype: str) -> Case:
    if dtype not in ("bfloat16", "float16", "float32"):
        raise typer.BadParameter(f"--dtype must be bfloat16, float16 or float32; got {dtype}")
    if length % block:
        raise typer.BadParameter(
            f"--length must be a multiple of --block, as the model counts; got {length} and {block}"
        )
    return Case(DENSE, None, batch, heads, length, dim, block, getattr(torch, dtype))


def run(name: str, shapes: list[Case], counters: bool, device: str, commit: str | None, out: Path) -> None:
    """Records each shape at every density: first how far ours is from standard attention."""
    bench = Bench.start("io", device, commit, out)
    for shape in shapes:
        path = f"{name}/{shape.shape}"
        bench.add(f"{path}/largest-difference/dense", largest_difference(shape, bench.device), "1")
        cases = every_density(shape)
        for case in cases:
            count(bench, path, case, counters=counters and bench.device.type == "cuda")
        for which in ("forward", "both"):
            bench.time(f"{path}/time/{which}", {case.way: way_of(case, which, bench.device) for case in cases})
    bench.finish()


def way_of(case: Case, which: str, device: torch.device) -> Way:
    """A pass of a case, whose inputs are made when it is first called, with its cost by the model."""
    made: list[Callable[[], object]] = []

    def call() -> None:
        if not made:
            made.append(getattr(calls_of(case, device), which))
        made[0]()

    found = cost(case)
    flops = found.flops if which == "both" else found.forward_flops
    # That standard attention runs out of memory is a result.
    return Way(call, settings={"flops": flops, "live": case.mask().density}, peer=True)


def count(bench: Bench, path: str, case: Case, *, counters: bool) -> None:
    """GB by the model and, if `counters`, as the GPU counts them: from HBM and from the L2 cache."""
    model = cost(case)
    bench.add(f"{path}/modelled-bytes/forward/{case.way}", model.forward_bytes / 1e9, "GB")
    bench.add(f"{path}/modelled-bytes/both/{case.way}", model.bytes / 1e9, "GB")
    for which in ("forward", "both") if counters else ():
        try:
            found = counted(case, which)
        except NoCountersError as failure:
            bench.add(f"{path}/hbm-bytes/{which}/{case.way}", None, "GB", failure=str(failure))
            return
        bench.add(f"{path}/hbm-bytes/{which}/{case.way}", found.hbm / 1e9, "GB")
        bench.add(f"{path}/l2-bytes/{which}/{case.way}", found.l2 / 1e9, "GB")


if __name__ == "__main__":
    app()
