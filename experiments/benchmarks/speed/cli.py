"""The command line: the run, and the report of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.speed import frame, report
from experiments.benchmarks.speed.cases import CASES, GROUPS, Case, select
from experiments.benchmarks.speed.inputs import Options
from experiments.benchmarks.speed.peers import DEFAULT_PEERS, PEERS, named, ours
from experiments.benchmarks.speed.rows import FAILED, OURS, WRONG, Row, write_csv
from experiments.benchmarks.speed.run import run_cases
from experiments.training.cli_errors import short_errors
from experiments.training.environment import command_line, environment, in_a_line
from sparseflash.blockmask.arguments import BLOCKS

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
console = Console()

RESULTS = Path("experiments/results/speed")
QUICK_MINUTES = 2.7  # a case that begins before this ends within three minutes


def _names(given: Sequence[str] | None) -> tuple[str, ...]:
    """The values of an option that may be repeated, or have several values separated by commas."""
    return tuple(dict.fromkeys(name.strip() for each in given or () for name in each.split(",") if name.strip()))


def _list() -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("group", "what it answers (time on an H100)", "cases"):
        table.add_column(column)
    for group, question in GROUPS.items():
        table.add_row(group, question, ", ".join(case.name for case in CASES if case.group == group))
    console.print(table)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in DEFAULT_PEERS:
        raise typer.BadParameter(f"--device must be cuda, cuda:<number> or cpu; got {name}.")
    return device


def _options(device: torch.device, quick: bool, heads: int, seed: int) -> Options:
    if device.type == "cpu":
        return Options(device, rounds=1, round_ms=0.0, heads=heads, calls=2, seed=seed)
    if quick:
        return Options(device, rounds=2, round_ms=40.0, heads=heads, seed=seed)
    return Options(device, heads=heads, seed=seed)


def _sized(case: Case, length: int | None, block: int | None, device: torch.device) -> Case:
    if length is None and device.type != "cpu":
        return case
    most = 32 if device.type == "cpu" else case.block
    return case.shrunk(length or 256, block or min(case.block, most))


@app.callback(
    invoke_without_command=True,
    epilog="Several commands in a limited time: see experiments/benchmarks/speed/README.md.",
)
def main(
    context: typer.Context,
    group: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(GROUPS)}; may be repeated.", show_default="all, over half an hour"),
    ] = None,
    cases: Annotated[str, typer.Option(help="Comma-separated globs over the names of the cases.")] = "*",
    list_: Annotated[bool, typer.Option("--list", help="Print the groups and their cases, and stop.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Six masks at D=64 and D=128, fewer repeats, under three minutes.")
    ] = False,
    peers: Annotated[
        str | None,
        typer.Option(help=f"Comma-separated, from {', '.join(PEERS)}; none: ours alone.", show_default="all that fit"),
    ] = None,
    flex_autotune: Annotated[
        bool, typer.Option("--flex-autotune", help="Tune FlexAttention in every case: over a minute a shape.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where speed.csv, speed.md and the pictures go.")] = RESULTS,
    device: Annotated[
        str, typer.Option(help="cuda, or cpu: every case shrunk, a test of the benchmark itself.")
    ] = "cuda",
    length: Annotated[
        int | None,
        typer.Option(help="Tokens, with one sequence and two heads.", show_default="of the case, 256 on a CPU"),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(help="Tokens a mask block, with --length.", show_default="of the case, at most 32 on a CPU"),
    ] = None,
    check_heads: Annotated[int, typer.Option(help="Heads whose outputs and gradients are compared with fp64.")] = 3,
    minutes: Annotated[
        float | None, typer.Option(help="No case begins later than this.", show_default="no limit; 2.7 with --quick")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    commit: Annotated[str | None, typer.Option(help="What to call the code measured, where git cannot tell.")] = None,
) -> None:
    """Time sparseflash beside its peers, after checking that it is right.

    Ends with 1 if ours was wrong or failed somewhere, with 2 for options that cannot be served.
    """
    if context.invoked_subcommand is not None:
        return
    if list_:
        _list()
        return
    where = _device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device; --device cpu runs the same on tiny lengths")
    if where.type == "cpu" and out == RESULTS:
        raise typer.BadParameter(
            f"a test on the CPU must not replace what is in {RESULTS}: name another folder by --out"
        )
    if block is not None and block not in BLOCKS:
        raise typer.BadParameter(f"--block must be one of {', '.join(map(str, BLOCKS))}; got {block}.")
    try:
        chosen_peers = named(peers) if peers is not None else DEFAULT_PEERS[where.type]
        chosen = select(cases, groups=_names(group), quick=quick)
    except ValueError as failure:
        raise typer.BadParameter(str(failure)) from None
    chosen = [_sized(case, length, block, where) for case in chosen]
    if flex_autotune:
        chosen_peers = tuple(dict.fromkeys((*chosen_peers, "flex-autotune")))
        chosen = [replace(case, tuned=True) for case in chosen]
    facts = environment(where, command_line("experiments.benchmarks.speed"), commit)
    print(in_a_line(facts), flush=True)
    out.mkdir(parents=True, exist_ok=True)

    def write(rows: list[Row]) -> None:
        write_csv(rows, facts, out / "speed.csv")  # after every case, so that a run that is cut short keeps its results

    limit = minutes if minutes is not None else QUICK_MINUTES if quick else float("inf")
    rows = run_cases(
        chosen,
        ours,
        {name: PEERS[name] for name in chosen_peers},
        _options(where, quick, check_heads, seed),
        minutes=limit,
        done=write,
    )
    _report([out / "speed.csv"], out)
    if any(row.peer == OURS and row.status in (WRONG, FAILED) for row in rows):
        raise typer.Exit(1)


@app.command("report")
def report_command(
    files: Annotated[list[Path], typer.Argument(help="speed.csv of several runs.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Where all.csv, speed.md and the pictures go.")] = RESULTS,
) -> None:
    """Make one report of several runs. Ratios are of one run; of a case that several runs have, the newest is shown."""
    with short_errors():
        rows = frame.read(files)
    out.mkdir(parents=True, exist_ok=True)
    rows.to_csv(out / "all.csv", index=False, lineterminator="\n")
    _report(files, out)


def _report(files: Sequence[Path], out: Path) -> None:
    """Prints and writes the report of the files."""
    rows = frame.read(files)
    for device in dict.fromkeys(rows["device"]):
        print("\n" + report.text(rows[rows["device"] == device]), flush=True)
    written = report.save(rows, out)
    console.print(f"\nWritten to {out}: {', '.join(path.name for path in written)}", soft_wrap=True)
