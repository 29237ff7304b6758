"""`python -m experiments.benchmarks.calls`: the table of what calls cost the host."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()

RESULTS = Path("experiments/results/calls")


@app.command()
def calls(
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    tokens: Annotated[int, typer.Option(min=16)] = 256,
    dim: Annotated[int, typer.Option(help="Head dim.", min=16, max=256)] = 64,
    block: Annotated[int, typer.Option(help="Tokens a tile of the mask.", min=16, max=128)] = 64,
    rounds: Annotated[int, typer.Option(help="Turns of each implementation.", min=1)] = 15,
    count: Annotated[int, typer.Option(help="Calls a turn.", min=1)] = 100,
    first: Annotated[bool, typer.Option(help="Also the first calls of new processes; a minute.")] = True,
    launcher: Annotated[bool, typer.Option(help="Also time our kernels through Triton's own launcher.")] = False,
    commit: Annotated[str | None, typer.Option(help="Default: git's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page and the CSV file.")] = RESULTS,
) -> None:
    """Host microseconds of short calls: sparseflash, SDPA and FlexAttention in turns. It takes two minutes."""
    import torch

    from experiments.benchmarks.calls import report
    from experiments.benchmarks.calls.first_calls import first_calls
    from experiments.benchmarks.calls.ways import (
        IMPLEMENTATIONS_OF,
        OURS,
        THROUGH_TRITON,
        WAYS,
        Shape,
        calls_of,
        through_triton,
    )
    from experiments.benchmarks.timing import Timed, of_single_calls
    from experiments.training.environment import command_line, environment

    if not torch.cuda.is_available():
        raise typer.BadParameter("this measures the host beside a GPU, and there is none here.")
    device = torch.device("cuda")
    shape = Shape(batch, heads, tokens, dim, block)
    facts = environment(device, command_line("experiments.benchmarks.calls"), commit)
    made = {name: calls_of(implementation(shape, device), shape, device)
            for name, implementation in IMPLEMENTATIONS_OF.items()}  # fmt: skip
    if launcher:
        made[THROUGH_TRITON] = made[OURS]
    rows: list[report.Row] = []
    for way in WAYS:
        with console.status(way):
            in_turns = {
                name: Timed(calls[way], through_triton if name == THROUGH_TRITON else nullcontext)
                for name, calls in made.items() if way in calls
            }  # fmt: skip
            timings = of_single_calls(in_turns, device, rounds=rounds, count=count)
        rows += [report.Row.of(way, name, timing) for name, timing in timings.items()]
        report.write(out, rows, shape, facts)
    for name in IMPLEMENTATIONS_OF if first else ():
        with console.status(f"first calls: {name}"):
            rows += first_calls(name)
        report.write(out, rows, shape, facts)
    console.print(report.markdown(rows, shape, facts), markup=False, highlight=False)


if __name__ == "__main__":
    app()
