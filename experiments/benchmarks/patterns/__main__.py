from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from experiments.benchmarks.harness import chosen
from experiments.benchmarks.patterns import flex, gallery, table
from experiments.benchmarks.patterns.catalogue import PATTERNS, Pattern, select
from experiments.benchmarks.patterns.measure import AT, BLOCK, Row, measure
from experiments.training.cli_errors import short_errors
from experiments.training.options import command_group
from sparseflash.blockmask.arguments import BLOCKS

app = command_group("The pattern library as one page of pictures and one table of numbers.")
RESULTS = Path("experiments/results/patterns.json")
# FlexAttention evaluates all scores: variants of a rule take equally long.
PEERS = ("families", "all", "none")
PEER_SECONDS, PEER_GIGABYTES = 4.0, 8.0  # the most that one build of FlexAttention may take

Only = Annotated[list[str] | None, typer.Option("--only", help="A pattern's name; may be repeated. All by default.")]


@app.command(name="gallery")
def draw_gallery(
    out: Annotated[Path, typer.Option(help="The PNG file to write.")] = Path("masks/gallery.png"),
    tokens: Annotated[int, typer.Option(help="Length of the masks drawn.", min=1)] = 1024,
    block: Annotated[int, typer.Option(help="Tokens a tile side.")] = 32,
    only: Only = None,
) -> None:
    """Draw every pattern into one page."""
    chosen("--block", [block], BLOCKS)
    patterns = select(only)
    path = gallery.save(gallery.page(patterns, tokens, block), out)
    print(f"{len(patterns)} patterns, {path.stat().st_size / 1000:.0f} KB: {path}")


@app.command(name="table")
def make_table(
    out: Annotated[Path | None, typer.Option(help="A Markdown file, for the table between its two marks.")] = None,
    results: Annotated[Path, typer.Option(help="JSON file of all rows, --only or not.")] = RESULTS,
    only: Only = None,
    tokens: Annotated[int | None, typer.Option(help="Built length.", show_default="the pattern's", min=1)] = None,
    at: Annotated[int, typer.Option(help="Length at which density, tiles and layers are counted.", min=1)] = AT,
    block: Annotated[int, typer.Option(help="Tokens a tile side.")] = BLOCK,
    repeats: Annotated[int, typer.Option(help="Builds whose median time is taken.", min=1)] = 5,
    peers: Annotated[str, typer.Option(help=", ".join(PEERS))] = PEERS[0],
) -> None:
    """Measure every pattern; print the table, write it into a Markdown file.

    peers: for which patterns FlexAttention's create_block_mask is measured too, half a minute each: those with names
    without a comma (families), all that have a formula, or none.
    """
    patterns = select(only)
    chosen("--block", [block], BLOCKS)
    chosen("--peers", [peers], PEERS)
    if results == RESULTS and (tokens is not None or (at, block) != (AT, BLOCK)):
        raise typer.BadParameter(
            f"a test with --tokens, --at or --block must not replace what is in {RESULTS}: name another file by "
            "--results"
        )
    with short_errors():
        rows = table.load(results)
    for number, pattern in enumerate(patterns, 1):
        print(f"[{number}/{len(patterns)}] {pattern.name}", flush=True)
        row = measure(pattern, tokens=tokens, at=at, block=block, repeats=repeats)
        if is_asked(peers, pattern):
            limits = {"block": block, "seconds": PEER_SECONDS, "gigabytes": PEER_GIGABYTES}
            eager, compiled = (flex.longest(pattern.name, mode, **limits) for mode in flex.MODES)
            row = replace(row, eager=eager, compiled=compiled)
        elif pattern.name in rows:
            row = replace(row, eager=rows[pattern.name].eager, compiled=rows[pattern.name].compiled)
        rows[pattern.name] = row
        table.save((rows[name] for name in _order(rows)), results)
    text = table.markdown([rows[name] for name in _order(rows)])
    print(text)
    if out is not None:
        table.put(text, out)
        print(f"Table: {out}")
    print(f"All numbers: {results}")


def is_asked(peers: str, pattern: Pattern) -> bool:
    return pattern.live is not None and (peers == "all" or (peers == "families" and not pattern.is_variant))


def _order(rows: dict[str, Row]) -> list[str]:
    return [pattern.name for pattern in PATTERNS if pattern.name in rows]


if __name__ == "__main__":
    app()
