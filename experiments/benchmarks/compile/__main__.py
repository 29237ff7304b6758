"""`python -m experiments.benchmarks.compile`: compiles the kernels without a GPU and reports what they use.

show: registers, spills and shared memory of chosen kernels. shipped: the same and instruction counts for every shipped
configuration. versions: `shipped` under several versions of Triton. fits: whether all kernels fit in shared memory.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.compile.versions import CACHE, VERSIONS, compared, folder_of, run_with, version_in
from experiments.benchmarks.harness import chosen
from experiments.benchmarks.interpreter import compile_kernels

RESULTS = Path("experiments/results/compile")
ARITHMETIC = ("bfloat16", "float16", "tf32", "float32")

ARCH = Annotated[list[int] | None, typer.Option(help="90 for compute capability 9.0; may be repeated.")]
FAMILY = Annotated[list[str] | None, typer.Option(help="hopper or portable; may be repeated.")]

app = typer.Typer(add_completion=False)


@app.command()
def show(
    arch: ARCH = None,
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
    chosen("--arithmetic", arithmetic, ARITHMETIC)
    compile_kernels()
    from experiments.benchmarks.compile.report import compile_all
    from sparseflash.backends.triton.architecture import architecture_of
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
                            limit = architecture_of(divmod(a, 10)).shared_memory
                            too_much = r.shared > limit
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


@app.command()
def fits(
    changes: Annotated[
        list[str] | None, typer.Option(help="none, few (at most two) or any changes of scores; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the drawn cases.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="File of the results.", show_default=f"{RESULTS}/fits-triton-VERSION.csv")
    ] = None,
) -> None:
    """Whether the portable kernels fit in shared memory on GPUs of compute capability 8.0, 8.6, 8.9, 9.0 and 10.0.

    Compiles drawn cases that cover every pair of properties: changes of scores, dtypes, head dims, blocks, lengths,
    dropout and others. Takes seconds per case; cases that are already in the file are not compiled again. Exits with 1
    if a kernel does not fit.
    """
    compile_kernels()
    import triton

    from experiments.benchmarks.compile.cases import CHANGES, covering
    from experiments.benchmarks.compile.fits import fits_of, read, write

    wanted = chosen("--changes", changes, CHANGES)
    path = out or RESULTS / f"fits-triton-{triton.__version__}.csv"
    found = read(path)
    done = {fit.case for fit in found}
    cases = {str(case): case for kind in wanted for case in covering(kind, seed)}
    left = {name: case for name, case in cases.items() if name not in done}
    console = Console()
    for number, (name, case) in enumerate(left.items(), start=1):
        found += fits_of(case)
        write(path, found)
        console.print(f"{number} of {len(left)}: {name}", style="dim", highlight=False)
    over = [fit for fit in found if not fit.fits]
    fewer = [fit for fit in found if fit.has_fewer_stages]
    console.print(
        f"{len(found)} kernels of {len({fit.case for fit in found})} cases, {len(fewer)} of them with fewer stages "
        f"than were chosen; {len(over)} do not fit."
    )
    for fit in over:
        console.print(f"{fit.case}: {fit.kernel} {fit.config}, {fit.shared} bytes", highlight=False)
    if over:
        raise typer.Exit(1)


@app.command()
def shipped(
    arch: ARCH = None,
    family: FAMILY = None,
    out: Annotated[
        Path | None, typer.Option(help="File of the results.", show_default=f"{RESULTS}/kernels-triton-VERSION.csv")
    ] = None,
) -> None:
    """Compile every shipped configuration with the installed Triton; store each kernel's resources and instructions.

    Takes seconds for each of hundreds of kernels; kernels that are already in the file are not compiled again.
    """
    compile_kernels()
    import triton

    from experiments.benchmarks.compile.shipped import ARCHS, FAMILIES, Kernel, compiled, groups, read, write

    wanted = chosen("--arch", arch, ARCHS), chosen("--family", family, FAMILIES)
    path = out or RESULTS / f"kernels-triton-{triton.__version__}.csv"
    found = read(path)
    done = {(each.arch, each.family, each.arithmetic, each.dim, each.features) for each in found}
    left = [group for group in groups(*wanted) if tuple(group) not in done]
    console = Console()
    for number, group in enumerate(left, start=1):
        for row in compiled(group):
            found[Kernel(*(row.pop(name) for name in Kernel._fields))] = row
        write(path, found)
        console.print(f"{triton.__version__}: {number} of {len(left)}, {' '.join(map(str, group))}", style="dim")


@app.command()
def versions(
    triton: Annotated[
        list[str] | None,
        typer.Option(help="A version, which pip installs, or a folder with one; may be repeated.",
                     show_default=", ".join(VERSIONS)),
    ] = None,
    arch: ARCH = None,
    family: FAMILY = None,
    cache: Annotated[Path, typer.Option(help="Where pip puts versions of Triton.")] = CACHE,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
    every: Annotated[bool, typer.Option("--every", help="Also show kernels that no version changes.")] = False,
) -> None:  # fmt: skip
    """Compare every shipped configuration under several versions of Triton.

    Compiles the kernels that are not stored yet: see the command `shipped`. Shows the kernels that differ between
    versions.
    """
    words = [f"--arch={each}" for each in arch or ()] + [f"--family={each}" for each in family or ()]
    stored = {}
    for each in triton or VERSIONS:
        try:
            folder = folder_of(each, cache)
            version = version_in(folder)
            stored[version] = out / f"kernels-triton-{version}.csv"
            run_with(folder, "shipped", f"--out={stored[version]}", *words)
        except RuntimeError as error:
            raise typer.BadParameter(str(error)) from None
    from experiments.benchmarks.compile.shipped import read

    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(compared({version: read(path) for version, path in stored.items()}, every=every))


if __name__ == "__main__":
    app()
