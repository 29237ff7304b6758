"""The command: times every case and writes the table and the numbers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from experiments.benchmarks.interpreter import compile_kernels

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
PEERS = "flex,fa4,fa4-deterministic,sdpa-cudnn,sdpa-fa2"


@app.command()
def layer(
    cases: Annotated[
        str, typer.Option(help="Comma-separated globs over the speed benchmark's names of cases.")
    ] = "d*-dense,d*-causal,d*-butterfly,d*-local,d*-bigbird,d*-random12",
    peers: Annotated[str, typer.Option(help="Comma-separated; none: ours alone.")] = PEERS,
    length: Annotated[
        int | None, typer.Option(help="Tokens, with two heads and blocks of 32: a trial.", show_default="of the case")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Series of each implementation, in turns.")] = 3,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a trial with --length.")] = "cuda",
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/layer"),
    seed: Annotated[int, typer.Option(help="Of weights and inputs.")] = 0,
    commit: Annotated[str | None, typer.Option(help="The commit to note.", show_default="git's")] = None,
) -> None:
    """Time a forward and a backward pass of one compiled transformer layer, with each attention in turns.

    RMSNorm, projections, attention, an MLP four times as wide, bf16 weights, 16,384 tokens of 2,048 channels. What
    comes through attention to the weights is compared with ours first; that ours is right,
    `experiments.benchmarks.speed` shows. All cases with all peers take an estimated ten minutes on an H100, most of
    them compiling.
    """
    if device != "cpu":
        compile_kernels()
    import torch

    from experiments.benchmarks.layer import measure
    from experiments.benchmarks.speed.cases import select
    from experiments.benchmarks.speed.inputs import Options
    from experiments.benchmarks.speed.peers import PEERS as KNOWN
    from experiments.benchmarks.speed.peers import named
    from experiments.training.atomic_files import write_json, write_text
    from experiments.training.cli_errors import short_errors
    from experiments.training.distributed import find_device
    from experiments.training.environment import command_line, environment

    with short_errors():
        place = find_device(device)
        names = named(peers, [name for name in KNOWN if name != "flex-autotune"])  # whose mode an outer graph drops
        if place.type == "cpu" and length is None:
            raise ValueError("--device cpu must have a small --length, such as 256.")
        chosen = select(cases)
        if length is not None:
            chosen = [case.shrunk(length, 32) for case in chosen]
        about = environment(place, command_line("experiments.benchmarks.layer"), commit)
        out.mkdir(parents=True, exist_ok=True)
        options = Options(place, rounds=rounds, round_ms=0.0 if place.type == "cpu" else 200.0, seed=seed)
        rows: list[measure.Row] = []
        for number, case in enumerate(chosen, 1):
            torch.compiler.reset()  # a graph for each case and peer would reach the limit of recompilations
            found = measure.run_case(case, names, options)
            rows += found
            print(f"[{number}/{len(chosen)}]", measure.table(found, [case]).splitlines()[-1], flush=True)
            for row in found:
                if row.reason:
                    print(f"  {row.peer}: {row.reason}", flush=True)
            # After each case, so that a run that is cut short keeps its results.
            write_json(out / "layer.json", {**about, "rows": [asdict(row) for row in rows]})
            write_text(out / "layer.md", measure.table(rows, chosen) + "\n")
        print(measure.table(rows, chosen))
