"""`python -m experiments.benchmarks.calls`: the host overhead of calls."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from experiments.benchmarks.calls.first_calls import record_first_calls
from experiments.benchmarks.calls.ways import (
    IMPLEMENTATIONS_OF,
    OURS,
    THROUGH_TRITON,
    WAYS,
    Shape,
    calls_of,
    through_triton,
)
from experiments.benchmarks.harness import Bench, Commit, Out, Rounds, Way

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def calls(
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    tokens: Annotated[int, typer.Option(min=16)] = 256,
    dim: Annotated[int, typer.Option(help="Head dim.", min=16, max=256)] = 64,
    block: Annotated[int, typer.Option(help="Tokens a tile of the mask.", min=16, max=128)] = 64,
    rounds: Rounds = 15,
    count: Annotated[int, typer.Option(help="Calls a turn.", min=1)] = 100,
    first: Annotated[bool, typer.Option(help="Also the first calls of new processes; a minute.")] = True,
    launcher: Annotated[bool, typer.Option(help="Also time our kernels through Triton's own launcher.")] = False,
    commit: Commit = None,
    out: Out = Path("runs/calls"),
) -> None:
    """Host microseconds of short calls in bf16: sparseflash, SDPA and FlexAttention in turns. It takes two minutes."""
    bench = Bench.start("calls", "cuda", commit, out, rounds=rounds)
    shape = Shape(batch, heads, tokens, dim, block)
    made = {name: calls_of(implementation(shape, bench.device), shape, bench.device)
            for name, implementation in IMPLEMENTATIONS_OF.items()}  # fmt: skip
    if launcher:
        made[THROUGH_TRITON] = made[OURS]
    contexts = {THROUGH_TRITON: through_triton}
    for way in WAYS:
        ways = {
            name: Way(of_way[way], contexts.get(name, nullcontext), shape._asdict(), peer=True)
            for name, of_way in made.items() if way in of_way
        }  # fmt: skip
        bench.time(way, ways, host_calls=count)
    for name in IMPLEMENTATIONS_OF if first else ():
        record_first_calls(bench, name)
    bench.finish()


if __name__ == "__main__":
    app()
