"""show: registers, spills and shared memory of chosen kernels. versions: the same under several versions of Triton."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.harness import chosen
from experiments.benchmarks.interpreter import compile_kernels

RESULTS = Path("experiments/results/compile")
ARITHMETIC = ("bfloat16", "float16", "tf32", "float32")
# positions: dropout by positions in a whole sequence, as over several GPUs. split: rows and columns in chunks.
TRITON = "A version such as 3.6, which pip installs into a cache, or a folder with Triton; may be repeated."
FEATURES = ("lengths", "dropout", "positions", "split", "gathered")

app = typer.Typer(add_completion=False)


@app.command()
def show(
    arch: Annotated[list[int] | None, typer.Option(help="90 for compute capability 9.0; may be repeated.")] = None,
    dim: Annotated[list[int] | None, typer.Option(help="Head dim; may be repeated.")] = None,
    arithmetic: Annotated[list[str] | None, typer.Option(help=f"From {', '.join(ARITHMETIC)}.")] = None,
    value_dim: Annotated[int | None, typer.Option(help="Head dim of values.", show_default="the same")] = None,
    with_: Annotated[list[str] | None, typer.Option("--with", help=f"From {', '.join(FEATURES)}.")] = None,
    block: Annotated[int, typer.Option(help="Tokens a tile of the mask.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON a kernel instead of a table.")] = False,
) -> None:
    """Compile the kernels for an architecture that need not be present, and show what they use.

    registers and spilled bytes are per thread, shared memory per program. Exits with 1 if a kernel needs more shared
    memory than the architecture has.
    """
    chosen("--arithmetic", arithmetic, ARITHMETIC)
    features = dict.fromkeys(chosen("--with", with_, FEATURES) if with_ else (), True)
    compile_kernels()
    from experiments.benchmarks.compile.report import compile_all
    from sparseflash.backends.triton.architecture import architecture_of
    from sparseflash.blockmask.arguments import BLOCKS

    chosen("--block", [block], BLOCKS)
    if "gathered" in features and block > 32:
        raise typer.BadParameter(f"--with gathered needs a --block of 16 or 32; got {block}.")
    if "positions" in features and "dropout" not in features:
        raise typer.BadParameter("--with positions needs --with dropout.")

    columns = ("arch", "arithmetic", "kernel", "loads", "D", "registers", "spilled", "shared", "notes")
    table, over = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)), False
    every = product(arch or [90], arithmetic or ["bfloat16"], dim or [64, 128], (True, False))
    for a, kind, d, descriptors in every:
        if descriptors and (a < 90 or "gathered" in features):
            continue
        found = compile_all(a, kind, d, value_dim=value_dim, block=block, descriptors=descriptors, **features)
        asked = {"arch": a, "arithmetic": kind, "dim": d, "value_dim": value_dim or d, "with": [*features]}
        for r in found:
            limit = architecture_of(divmod(a, 10)).shared_memory
            over = over or r.shared > limit
            if as_json:
                print(json.dumps(asked | asdict(r)), flush=True)
            said = {
                f"over the limit of {limit}": r.shared > limit, "serialised wgmma": r.serialised,
                "two layouts at one address": r.two_layouts, "started by Triton's front": not r.direct,
            }  # fmt: skip
            numbers = map(str, (d, r.registers, r.spilled, r.shared))
            loads = "descriptors" if r.descriptors else "pointers"
            notes = ", ".join(note for note, holds in said.items() if holds)
            table.add_row(f"sm_{a}", kind, r.kernel, loads, *numbers, notes)
    if not as_json:
        Console().print(table)
    if over:
        raise typer.Exit(1)


@app.command()
def versions(
    triton: Annotated[list[str] | None, typer.Option(help=TRITON, show_default="the oldest, the newest")] = None,
    out: Annotated[Path, typer.Option(help="File of the numbers.")] = RESULTS / "versions.csv",
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Compile kernels of both families for compute capability 9.0 under several versions of Triton, and compare them.

    Shows the kernels whose spilled bytes, shared memory or number of instructions differ. Exits with 1 if a kernel does
    not compile. About five minutes a version.
    """
    compile_kernels()
    from experiments.benchmarks.compile.versions import compared, compiled_with, rows, write
    from sparseflash.backends.triton.versions import MEASURED

    if here:
        import triton as installed

        print(json.dumps(installed.__version__))
        for row in rows():
            print(json.dumps(row), flush=True)
        return
    found = {}
    for each in triton or ["{}.{}".format(*MEASURED[number].triton) for number in (0, -1)]:
        try:
            version, numbers = compiled_with(each)
        except RuntimeError as error:
            print(f"Error: {error}.", file=sys.stderr)
            raise typer.Exit(1) from None
        found[version] = numbers
        write(out, found)
    Console(width=None if sys.stdout.isatty() else 160).print(compared(found))


if __name__ == "__main__":
    app()
