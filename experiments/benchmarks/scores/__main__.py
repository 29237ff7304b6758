"""`python -m experiments.benchmarks.scores`: the cost of score modifications, relative to plain attention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.benchmarks.harness import Bench, Commit, Device, Out, Rounds, Way, chosen
from experiments.benchmarks.scores.cases import NAMES, TARGETS, calls
from experiments.benchmarks.scores.first_use import seconds_of
from experiments.benchmarks.scores.ways import BACKENDS, FLEX, OURS, PLAIN, Sizes, Ways
from experiments.measurements import ratio

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    case: Annotated[list[str] | None, typer.Option(help="May be repeated.", show_default="all")] = None,
    flex: Annotated[bool, typer.Option("--flex", help="Time FlexAttention with the same score_mod, too.")] = False,
    first: Annotated[
        bool,
        typer.Option(
            "--first", help="Instead: seconds until the first result of each case, in new processes with empty caches."
        ),
    ] = False,
    length: Annotated[int, typer.Option(help="Tokens.")] = 8192,
    heads: Annotated[int, typer.Option(help="Heads of one batch element.")] = 16,
    dim: Annotated[int, typer.Option(help="Head dim.")] = 128,
    backend: Annotated[
        str, typer.Option(help="auto: the kernels that attention() takes; triton: the portable ones; hopper: those.")
    ] = "auto",
    rounds: Rounds = 5,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = Path("runs/scores"),
) -> None:
    """Time causal attention in bf16 with each score modification, forward and with the backward.

    Plain attention is timed beside each case, with the same --backend. Its kernels may differ: see explain().
    With all cases about a minute on an H100, most of it compiling; with --flex about four on an H200. With --first half
    a minute a case.
    """
    names = chosen("--case", case, NAMES)
    chosen("--backend", [backend], BACKENDS)
    bench = Bench.start("scores", device, commit, out, rounds=rounds, round_ms=30.0)
    sizes, libraries = Sizes(length, heads, dim, device, backend), (OURS, FLEX) if flex else (OURS,)
    if first:
        for name in names:
            for library in libraries:
                _first_use(bench, name, library, sizes)
    else:
        _times(bench, names, libraries, Ways(sizes), {"heads": heads, "tokens": length})
    bench.finish()
    for line in over_plain(bench):
        print(line)


def _times(bench: Bench, names: list[str], libraries: tuple[str, ...], ways: Ways, settings: dict[str, object]) -> None:
    plain = {library: ways.plain(library) for library in libraries}
    groups = {PLAIN: plain} if len(libraries) > 1 else {}
    for each in ways.cases(names):
        changed = {library: way for library in libraries if (way := ways.changed(each, library)) is not None}
        groups[each.name] = changed | {f"{ways.ours}-{PLAIN}": plain[OURS]}
    for name, group in groups.items():
        timed = {
            f"{what}/{ways.ours if library == OURS else library}": Way(call, settings=settings, peer=library == FLEX)
            for library, way in group.items()
            for what, call in calls(way.run, way.wanted, ways.dout).items()
        }
        bench.time(f"{ways.dim}/{name}", timed)


def _first_use(bench: Bench, name: str, library: str, sizes: Sizes) -> None:
    try:
        for what, seconds in seconds_of(name, library, sizes).items():
            if f"scores/first-use/{what}" not in [each.name for each in bench.measurements]:  # plain, of another case
                bench.add(f"first-use/{what}", seconds, "s")
    except RuntimeError as failure:  # keep the other results
        bench.add(f"first-use/{name}-forward/{library}", None, "s", failure=str(failure))
    bench.save()


def over_plain(bench: Bench) -> list[str]:
    """For each case and pass: the time relative to plain attention in the same turns, and the target."""
    lines = []
    for each in bench.measurements:
        _, _, case, what = each.name.split("/")[:4]
        if each.way.endswith(f"-{PLAIN}"):
            times = ratio(bench.measurements, each.name.removesuffix(f"-{PLAIN}"), each.name)
            aim = f", wanted {TARGETS[case]:.2f}" if case in TARGETS else ""
            lines.append(f"{case}, {what}: {times.value:.3f} over plain (spread {times.spread:.3f}){aim}")
    return lines


if __name__ == "__main__":
    app()
