"""`python -m experiments.benchmarks.scores`: the time of changed scores over that of plain attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.interpreter import run_kernels_on
from experiments.training.atomic_files import write_csv

if TYPE_CHECKING:
    from experiments.benchmarks.scores.ways import Sizes

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(width=120)


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
    rounds: Annotated[int, typer.Option(help="Series of each implementation, in turns.")] = 5,
    device: Annotated[str, typer.Option(help="cuda, or cpu: the interpreter, a test of the experiment.")] = "cuda",
    out: Annotated[Path, typer.Option(help="Folder of scores.csv, or of first_use.csv.")] = Path("runs/scores"),
) -> None:
    """Time causal attention in bf16 with each change of scores, forward and with the backward.

    over plain: the time relative to that of unchanged scores with the same --backend, whose kernels may be others:
    explain() tells. Flex: how many times as long FlexAttention takes with the same score_mod. With all cases about a
    minute on an H100, most of it compiling; with --flex about four on an H200. With --first half a minute a case.
    """
    run_kernels_on(device)
    from experiments.benchmarks.scores.cases import NAMES
    from experiments.benchmarks.scores.ways import BACKENDS, FLEX, OURS, Sizes

    names = case or NAMES
    if unknown := set(names) - set(NAMES):
        raise typer.BadParameter(f"case must be of {', '.join(NAMES)}; got {', '.join(sorted(unknown))}")
    if backend not in BACKENDS:
        raise typer.BadParameter(f"backend must be {', '.join(BACKENDS)}; got {backend}")
    out.mkdir(parents=True, exist_ok=True)
    sizes, libraries = Sizes(length, heads, dim, device, backend), (OURS, FLEX) if flex else (OURS,)
    if first:
        _first_uses(names, libraries, sizes, out)
    else:
        _times(names, libraries, sizes, rounds, out)


def _times(names: Sequence[str], libraries: Sequence[str], sizes: Sizes, rounds: int, out: Path) -> None:
    from experiments.benchmarks.scores.cases import TARGETS, calls
    from experiments.benchmarks.scores.ways import OURS, PLAIN, Ways
    from experiments.benchmarks.timing import Timed, in_turns

    ways = Ways(sizes)
    plain = {library: ways.plain(library) for library in libraries}
    groups = [{PLAIN: plain}] if len(libraries) > 1 else []
    for each in ways.cases(names):
        changed = {library: way for library in libraries if (way := ways.changed(each, library)) is not None}
        groups.append({PLAIN: {OURS: plain[OURS]}, each.name: changed})

    rows: list[dict[str, Any]] = []
    for number, group in enumerate(groups):  # of what is compared, so that a run that is cut short has compared some
        timed = {
            (name, library, what): call
            for name, of_library in group.items()
            for library, way in of_library.items()
            for what, call in calls(way.run, way.wanted, ways.dout).items()
        }
        found = in_turns(
            {" ".join(key): Timed(call, nullcontext) for key, call in timed.items()},
            ways.place,
            rounds=rounds,
            round_ms=30.0,
        )
        for (name, library, what), timing in zip(timed, found.values(), strict=True):
            if timing.failure is not None:
                failure = f"{type(timing.failure).__name__}: {timing.failure}"
                console.print(f"{name} {library} {what}: {failure}", soft_wrap=True)
            row = {"group": number, "case": name, "library": library, "pass": what, "ms": timing.ms}
            rows.append(row | {"spread": timing.spread})
        write_csv(out / "scores.csv", rows)
        console.print(f"{number + 1} of {len(groups)}: {', '.join(group)}")
    _print(rows, TARGETS)


def _first_uses(names: Sequence[str], libraries: Sequence[str], sizes: Sizes, out: Path) -> None:
    from experiments.benchmarks.scores.first_use import seconds_of

    rows: list[dict[str, Any]] = []
    for name in names:
        for library in libraries:
            try:
                found = seconds_of(name, library, sizes)
            except RuntimeError as failure:  # the others are worth having
                console.print(f"{library:>12}  {name}: {failure}", soft_wrap=True)
                continue
            for what, seconds in found.items():
                rows.append({"case": name, "library": library, "first": what, "seconds": round(seconds, 2)})
                console.print(f"{library:>12}  {what:<24} {seconds:6.2f} s")
            if rows:
                write_csv(out / "first_use.csv", rows)


def _print(rows: list[dict[str, Any]], targets: dict[str, float]) -> None:
    table = Table(box=box.SIMPLE)
    for column in ("case", "pass", "ms", "over plain", "wanted", "Flex"):
        table.add_column(column, justify="left" if column in ("case", "pass") else "right")
    ms = {(row["group"], row["case"], row["library"], row["pass"]): row["ms"] for row in rows}
    for (group, name, library, what), time in ms.items():
        if library == "sparseflash" and (name != "plain" or (group, name, "flex", what) in ms):
            flex = ms.get((group, name, "flex", what))
            table.add_row(
                name, what, f"{time:.3f}", f"{time / ms[group, 'plain', library, what]:.3f}",
                f"{targets[name]:.2f}" if name in targets else "", "" if flex is None else f"{flex / time:.2f}",
            )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    app()
