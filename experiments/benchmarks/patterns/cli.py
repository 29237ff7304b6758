"""The command line, with the commands gallery and table."""

from __future__ import annotations

import time
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.benchmarks.patterns import flex, gallery, table
from experiments.benchmarks.patterns.catalogue import PATTERNS, Pattern, select
from experiments.benchmarks.patterns.measure import AT, BLOCK, Row, measure
from experiments.training.cli_errors import short_errors
from sparseflash.blockmask.arguments import BLOCKS

app = typer.Typer(
    help="The pattern library as one page of pictures and one table of numbers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
RESULTS = Path("experiments/results/patterns.json")

console = Console()
errors = Console(stderr=True)


class Peers(str, Enum):
    """The patterns for which FlexAttention is measured. It evaluates all scores, so variants of a rule take equally
    long.
    """

    families = "families"
    all = "all"
    none = "none"

    def include(self, pattern: Pattern) -> bool:
        if pattern.live is None or self is Peers.none:
            return False
        return self is Peers.all or not pattern.is_variant


Only = Annotated[list[str] | None, typer.Option("--only", help="A pattern's name; may be repeated. All by default.")]


@app.command(name="gallery")
def draw_gallery(
    out: Annotated[Path, typer.Option(help="The PNG file to write.")] = Path("masks/gallery.png"),
    tokens: Annotated[int, typer.Option(help="Length of the masks drawn.", min=1)] = 1024,
    block: Annotated[int, typer.Option(help="Tokens a tile side.")] = 32,
    columns: Annotated[int, typer.Option(help="Pictures side by side.", min=1)] = 5,
    only: Only = None,
) -> None:
    """Draw every pattern into one page."""
    chosen = _chosen(only)
    _check_block(block)
    with _progress() as bar:
        task = bar.add_task("drawing", total=len(chosen))
        figure = gallery.page(chosen, tokens, block, columns=columns, done=lambda pattern: bar.advance(task))
    path = gallery.save(figure, out)
    console.print(f"{len(chosen)} patterns, {path.stat().st_size / 1000:.0f} KB: {path}", soft_wrap=True)


@app.command(name="table")
def make_table(
    out: Annotated[
        Path | None, typer.Option(help="A Markdown file; the table goes between its two marks, or at its end.")
    ] = None,
    results: Annotated[
        Path, typer.Option(help="JSON file of all rows: what --only leaves out stays as measured there.")
    ] = RESULTS,
    only: Only = None,
    tokens: Annotated[
        int | None, typer.Option(help="Length at which building is timed.", show_default="each pattern's own", min=1)
    ] = None,
    at: Annotated[int, typer.Option(help="Length at which density, tiles and layers are counted.", min=1)] = AT,
    block: Annotated[int, typer.Option(help="Tokens a tile side.")] = BLOCK,
    repeats: Annotated[int, typer.Option(help="Builds whose median time is taken.", min=1)] = 5,
    peers: Annotated[
        Peers,
        typer.Option(
            help="For which patterns to measure FlexAttention's create_block_mask too, half a minute each: those named "
            "without a comma, all that have a formula, or none."
        ),
    ] = Peers.families,
    peer_seconds: Annotated[float, typer.Option(help="Longest that one build of FlexAttention may take.")] = 4.0,
    peer_minutes: Annotated[
        float, typer.Option(help="FlexAttention is not asked again after so long; its earlier numbers are kept.")
    ] = 12.0,
    peer_gigabytes: Annotated[float, typer.Option(help="Most memory that FlexAttention may take.")] = 8.0,
) -> None:
    """Measure every pattern; print the table, write it into a Markdown file."""
    chosen = _chosen(only)
    _check_block(block)
    if results == RESULTS and (tokens is not None or (at, block) != (AT, BLOCK)):
        _refuse(
            f"a test with --tokens, --at or --block must not replace what is in {RESULTS}: name another file by "
            "--results"
        )
    with short_errors():
        rows = table.load(results)
    start, left_out = time.monotonic(), []
    with _progress() as bar:
        task = bar.add_task("", total=len(chosen))
        for pattern in chosen:
            bar.update(task, description=escape(pattern.name))
            row = measure(pattern, tokens=tokens, at=at, block=block, repeats=repeats)
            asked = peers.include(pattern)
            if asked and time.monotonic() - start > 60 * peer_minutes:
                asked = False
                left_out.append(pattern.name)
            if asked:
                for mode in flex.MODES:
                    bar.update(task, description=escape(f"{pattern.name}, FlexAttention {mode}"))
                    peer = flex.longest(pattern.name, mode, block=block, seconds=peer_seconds, gigabytes=peer_gigabytes)
                    row = replace(row, eager=peer) if mode == "eager" else replace(row, compiled=peer)
            elif pattern.name in rows:
                # Measured before and not requested now.
                row = replace(row, eager=rows[pattern.name].eager, compiled=rows[pattern.name].compiled)
            rows[pattern.name] = row
            # After every pattern, so that a run that is cut short keeps its measurements.
            table.save((rows[name] for name in _order(rows)), results)
            bar.advance(task)
    text = table.markdown([rows[name] for name in _order(rows)])
    console.print(text, soft_wrap=True, markup=False, highlight=False)
    if out is not None:
        table.put(text, out)
        console.print(f"Table: {out}", soft_wrap=True)
    console.print(f"All numbers: {results}", soft_wrap=True)
    if left_out:
        again = " ".join(f'--only "{name}"' for name in left_out)
        console.print(f"No time for FlexAttention (--peer-minutes): {again}", soft_wrap=True, markup=False)


def _order(rows: dict[str, Row]) -> list[str]:
    """The names that are still in the catalogue, in its order."""
    return [pattern.name for pattern in PATTERNS if pattern.name in rows]


def _chosen(names: list[str] | None) -> list[Pattern]:
    try:
        return select(names)
    except ValueError as failure:
        _refuse(str(failure))


def _check_block(block: int) -> None:
    if block not in BLOCKS:
        _refuse(f"--block must be one of {', '.join(map(str, BLOCKS))}; got {block}.")


def _refuse(why: str) -> NoReturn:
    errors.print(f"[red]{escape(why)}[/red]", soft_wrap=True)
    raise typer.Exit(2)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console,
        disable=not console.is_terminal,
    )  # fmt: skip
