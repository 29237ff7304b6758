"""`python -m experiments.benchmarks.distributed`: `simulate` plans for many ranks, `measure` times a few."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from experiments.training.cli_errors import short_errors

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

    found = []
    patterns = _known(pattern, simulation.PATTERNS, "--pattern")
    for row in simulation.rows(patterns, tokens or list(simulation.TOKENS), ranks or list(simulation.RANKS)):
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
    heads: Annotated[
        list[str] | None, typer.Option(help="Query and key heads; may be repeated.", show_default="16:16, 32:8")
    ] = None,
    dim: Annotated[int, typer.Option(help="Head dim.")] = 128,
    way: Annotated[list[str] | None, typer.Option(help="May be repeated.", show_default="all")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu: gloo, a test of the experiment.")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="The commit to note.", show_default="git's")] = None,
    out: Annotated[Path, typer.Option(help="Where measured.json and measured.md go.")] = Path("runs/distributed"),
) -> None:
    """Time a forward pass, and a forward and a backward pass, in the processes that torchrun started: on one rank, with
    keys that travel before attention (0 st.) or in stages, queries, heads, all-gather, and PyTorch's context_parallel
    where it can run (dense and causal, on GPUs). First, one rank is compared with fp64, and the others with one rank.
    """
    from experiments.benchmarks.distributed.measure import measure as measured
    from experiments.benchmarks.distributed.simulate import PATTERNS
    from experiments.benchmarks.distributed.ways import WAYS

    chosen = _known(pattern, PATTERNS, "--pattern")
    with short_errors():
        measured(chosen, tokens, heads or ["16:16", "32:8"], dim, _known(way, WAYS, "--way"), device, commit, out)


def _known(given: list[str] | None, known: Iterable[str], option: str) -> list[str]:
    """The names given, by default all that are known."""
    unknown = [name for name in given or [] if name not in known]
    if unknown:
        raise typer.BadParameter(f"{option} must be one of {', '.join(map(repr, known))}; got {unknown[0]!r}.")
    return given or list(known)


if __name__ == "__main__":
    app()
