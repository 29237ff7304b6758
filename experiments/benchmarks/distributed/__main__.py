"""`python -m experiments.benchmarks.distributed`: `simulate` plans for many ranks, `measure` times a few."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def simulate(
    pattern: Annotated[list[str] | None, typer.Option(help="May be repeated.", show_default="all")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="May be repeated.", show_default="64K to 16M")] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="May be repeated.", show_default="2 to 1,024")] = None,
    out: Annotated[Path, typer.Option(help="Where the table and the plot go.")] = Path("runs/distributed"),
) -> None:
    """Plan the library's patterns over many ranks: bytes, balance, and the model's time beside that of other ways.

    Needs no GPU and no other process. A minute on a CPU core, and 4 GB of memory for the longest masks.
    """
    from experiments.benchmarks.distributed import simulate as simulation

    unknown = set(pattern or []) - set(simulation.PATTERNS)
    if unknown:
        raise typer.BadParameter(f"--pattern must be one of {', '.join(simulation.PATTERNS)}; got {unknown.pop()!r}.")
    found = []
    for row in simulation.rows(
        pattern or list(simulation.PATTERNS), tokens or list(simulation.TOKENS), ranks or list(simulation.RANKS)
    ):
        found.append(row)
        print(f"{row.pattern}, {row.tokens:,} tokens, {row.ranks} ranks: plan {row.plan_ms:.1f} ms", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / "simulated.md").write_text(simulation.markdown(found), encoding="utf-8")
    (out / "simulated.csv").write_text(simulation.csv(found), encoding="utf-8")
    simulation.plot(found, out / "simulated.png")


@app.command()
def measure(
    pattern: Annotated[list[str] | None, typer.Option(help="May be repeated.", show_default="all")] = None,
    tokens: Annotated[int, typer.Option(help="Of the whole sequence.")] = 131072,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="Key heads.")] = 8,
    dim: Annotated[int, typer.Option(help="Head dim.")] = 128,
    device: Annotated[str, typer.Option(help="cuda, or cpu: gloo, a test of the experiment.")] = "cuda",
    out: Annotated[Path, typer.Option(help="Where measured.json goes.")] = Path("runs/distributed"),
) -> None:
    """Time a forward and a backward pass in the processes that torchrun started: one rank, keys in one to four stages,
    queries, heads, all-gather, and PyTorch's context_parallel where it can run (causal, on GPUs).
    """
    from experiments.benchmarks.distributed.measure import measure as measured
    from experiments.benchmarks.distributed.simulate import PATTERNS

    measured(pattern or list(PATTERNS), tokens, heads, kv_heads, dim, device, out)


if __name__ == "__main__":
    app()
