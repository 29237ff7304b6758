"""`python -m experiments.benchmarks.compile`: registers, spills and shared memory of the kernels, without a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.compile.architectures import SHARED_LIMITS
from experiments.benchmarks.interpreter import compile_kernels

ARITHMETIC = ("bfloat16", "float16", "tf32", "float32")

app = typer.Typer(add_completion=False)


@app.command()
def main(
    arch: Annotated[list[int] | None, typer.Option(help="90 for compute capability 9.0; may be repeated.")] = None,
    dim: Annotated[list[int] | None, typer.Option(help="Head dim; may be repeated.")] = None,
    arithmetic: Annotated[
        list[str] | None, typer.Option(help="bfloat16, float16, tf32 or float32; may be repeated.")
    ] = None,
    value_dim: Annotated[
        int | None, typer.Option(help="Head dim of the values.", show_default="that of the queries and keys")
    ] = None,
    block: Annotated[int, typer.Option(help="Tokens a tile of the mask.")] = 128,
    lengths: Annotated[bool, typer.Option(help="With a mask that has lengths (padding).")] = False,
    dropout: Annotated[bool, typer.Option(help="With dropout of the weights.")] = False,
    positions: Annotated[
        bool, typer.Option(help="With --dropout: by positions in a whole sequence, as over several GPUs.")
    ] = False,
    split: Annotated[bool, typer.Option(help="With rows and columns that are cut into chunks.")] = False,
    gathered: Annotated[
        bool, typer.Option(help="With tiles gathered from the blocks of the mask, of 16 or 32 tokens: see --block.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON a kernel instead of a table.")] = False,
) -> None:
    """Compile the kernels for an architecture that need not be present, and show what they use.

    registers: per thread; spilled: bytes per thread, for lack of registers; shared: bytes of shared memory per program.
    Exits with 1 if a kernel needs more shared memory than the architecture has. Takes seconds for each kernel.
    """
    unknown = [kind for kind in arithmetic or () if kind not in ARITHMETIC]
    if unknown:
        raise typer.BadParameter(f"--arithmetic must be from {', '.join(ARITHMETIC)}; got {', '.join(unknown)}.")
    compile_kernels()
    from experiments.benchmarks.compile.report import compile_all
    from sparseflash.blockmask.arguments import BLOCKS

    if block not in BLOCKS:
        raise typer.BadParameter(f"--block must be one of {', '.join(map(str, BLOCKS))}; got {block}.")
    if gathered and block > 32:
        raise typer.BadParameter(f"--gathered needs a --block of 16 or 32; got {block}.")

    if positions and not dropout:
        raise typer.BadParameter("--positions needs --dropout.")

    console = Console()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("arch", "arithmetic", "kernel", "loads"):
        table.add_column(column, no_wrap=True)
    for column in ("D", "registers", "spilled", "shared"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("notes")
    over = []
    with console.status("compiling", spinner="line") as status:
        for a in arch or [90]:
            for kind in arithmetic or ["bfloat16"]:
                for d in dim or [64, 128]:
                    for descriptors in (True, False) if a >= 90 and not gathered else (False,):
                        status.update(f"sm_{a} {kind} D={d} {'descriptors' if descriptors else 'pointers'}")
                        variant: dict[str, Any] = {
                            "value_dim": value_dim, "block": block, "descriptors": descriptors, "lengths": lengths,
                            "dropout": dropout, "positions": positions, "split": split, "gathered": gathered,
                        }  # fmt: skip
                        for r in compile_all(a, kind, d, **variant):
                            limit = SHARED_LIMITS.get(a)
                            too_much = limit is not None and r.shared > limit
                            if too_much:
                                over.append(r)
                            if as_json:
                                print(json.dumps(asdict(r)), flush=True)
                            notes = [
                                *([f"over the limit of {limit}"] if too_much else []),
                                *(["serialised wgmma"] if r.serialised else []),
                                *(["two layouts at one address"] if r.two_layouts else []),
                                *([] if r.direct else ["started by Triton's front"]),
                            ]
                            table.add_row(
                                f"sm_{a}", kind, r.kernel, "descriptors" if r.descriptors else "pointers",
                                str(r.dim), str(r.registers), str(r.spilled), str(r.shared), ", ".join(notes),
                            )  # fmt: skip
    if not as_json:
        console.print(table)
    if over:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
