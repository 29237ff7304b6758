"""The commands and their options."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparseflash import BlockMask, __version__, analysis
from sparseflash.cli import bench as benchmark
from sparseflash.cli import check as exactness
from sparseflash.cli import show as words
from sparseflash.cli.expression import HELP, Refused, mask_of
from sparseflash.cli.inputs import DTYPES, drawn

app = typer.Typer(
    help="Block-sparse attention masks: what a mask costs and reaches, whether attention with it is exact on this "
    "machine, and how fast it is.\n\nMASK is a Python expression of sparseflash.masks or a file written by "
    "BlockMask.save: sparseflash show 'local(4096, window=512, causal=True)'",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Mask = Annotated[str, typer.Argument(metavar="MASK", help=HELP)]
Sources = Annotated[
    list[str] | None,
    typer.Option("--from", metavar="FILE", help="Python file or module with functions for MASK; repeatable."),
]
HeadDim = Annotated[int, typer.Option(help="Features of a head.", min=1)]
Heads = Annotated[int, typer.Option(help="Query heads, if the mask is shared by all heads.", min=1)]
KVHeads = Annotated[int | None, typer.Option(help="Key and value heads.", show_default="as many as query heads", min=1)]
Precision = Literal["bf16", "fp16", "fp32"]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, ...", show_default="cuda if there is a GPU, else cpu")
]


@app.command()
def show(
    mask: Mask,
    sources: Sources = None,
    head_dim: HeadDim = 64,
    heads: Heads = 1,
    dtype: Annotated[Precision, typer.Option(help="Dtype of queries, keys and values.")] = "bf16",
    causal: Annotated[bool, typer.Option("--causal", help="The mask must be causal: report future leaks.")] = False,
    width: Annotated[int, typer.Option(help="Width of the drawing in cells; 0: no drawing.", min=0)] = 32,
    picture: Annotated[Path | None, typer.Option(help="Write a picture to this file: .png, .pdf, .svg.")] = None,
    save: Annotated[Path | None, typer.Option(help="Save the mask to this file, for BlockMask.load and MASK.")] = None,
) -> None:
    """Show what a mask costs and reaches, and what is probably wrong with it."""
    found = asked(mask, sources)
    with short_errors():
        say(found.to_string(width) if width else repr(found))
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        for what, much in words.facts(found, head_dim=head_dim, heads=heads, dtype=DTYPES[dtype], causal=causal):
            table.add_row(what, Text(much))
        console.print(table)
        for finding in analysis.lint(found, causal=causal):
            say(str(finding))
        if picture is not None:
            found.plot().savefig(picture)
            say(f"Drawn: {picture}")
        if save is not None:
            found.save(save)
            say(f"Kept: {save}")


@app.command()
def check(
    mask: Mask,
    sources: Sources = None,
    head_dim: HeadDim = 64,
    heads: Heads = 2,
    kv_heads: KVHeads = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Comma-separated, of {', '.join(DTYPES)}.", show_default="all on a GPU, fp32 on a CPU"),
    ] = None,
    backend: Annotated[
        Literal["triton", "hopper", "blockwise", "reference"] | None,
        typer.Option(help="The backend to check.", show_default="triton on a GPU, blockwise on a CPU"),
    ] = None,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
) -> None:
    """Compare attention with a mask, and its gradients, with dense attention in fp64.

    Errors are relative to the allowed error: twice that of a plain implementation in the same precision, plus about one
    unit in the last place. Exits with status 1 if any of them is above 1.
    """
    found = asked(mask, sources)
    with short_errors():
        found = found.to(place(device))
        gpu = found.device.type == "cuda"
        dtypes = named(dtype, DTYPES, "--dtype") if dtype is not None else list(DTYPES) if gpu else ["fp32"]
        say(f"{found!r}", f"{where(found)}: errors relative to the allowed error")
        table = Table()
        table.add_column("")
        for name in exactness.NAMES:
            table.add_column(name, justify="right")
        right = True
        for each in dtypes:
            with console.status(f"{each}: comparing with fp64"):
                errors = exactness.errors(
                    found,
                    heads=heads,
                    kv_heads=kv_heads,
                    dim=head_dim,
                    dtype=DTYPES[each],
                    backend=backend,
                    seed=seed,
                )
            right &= all(error <= 1 for error in errors.values())
            table.add_row(each, *(Text(f"{error:.2f}", "" if error <= 1 else "bold red") for error in errors.values()))
        console.print(table)
    if not right:
        console.print("Not exact: an error is larger than allowed.", style="bold red")
        raise typer.Exit(1)
    console.print("Exact: no error is larger than allowed.")


@app.command()
def bench(
    mask: Mask,
    sources: Sources = None,
    batch: Annotated[int, typer.Option(help="Batch size, if the mask is shared by the batch.", min=1)] = 1,
    heads: Heads = 8,
    kv_heads: KVHeads = None,
    head_dim: HeadDim = 64,
    dtype: Annotated[
        Precision | None, typer.Option(help="Dtype of all tensors.", show_default="bf16 on a GPU, fp32 on a CPU")
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(help=f"Comma-separated, of {', '.join(benchmark.PEERS)}; none.", show_default="all that fit"),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Duration of each measurement.", min=0.01)] = 0.5,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
) -> None:
    """Time attention with a mask against dense attention and other libraries, after checking that it is exact.

    One head is checked; of long masks only the last 16,384 queries and keys (4,096 on a CPU). `check` takes all of
    them. Times are medians of warm calls, in milliseconds, host and device together. On a CPU the backend is blockwise,
    which is made to save memory, not for speed.
    """
    found = asked(mask, sources)
    with short_errors():
        found = found.to(place(device))
        precision = DTYPES[dtype or ("bf16" if found.device.type == "cuda" else "fp32")]
        chosen = benchmark.peers_for(found) if peers is None else peers_of(peers)
        compared = benchmark.corner(found)
        with console.status(f"comparing {compared.q_len:,} queries and {compared.k_len:,} keys with fp64"):
            errors = exactness.errors(
                compared, heads=1, kv_heads=None, dim=head_dim, dtype=precision, backend=None, seed=seed
            )
        if not all(error <= 1 for error in errors.values()):
            raise ValueError(f"attention with this mask must be exact to be timed; got the errors {errors}")
        inputs = drawn(found, batch=batch, heads=heads, kv_heads=kv_heads, dim=head_dim, dtype=precision, seed=seed)
        shape = " x ".join(str(size) for size in inputs.q.shape)
        shapes = f"{shape}, {inputs.k.shape[1]} key heads, {precision}"
        say(f"{found!r}", f"{where(found)}; {shapes}: ms, and the ratio to ours")
        table = Table()
        for column in ("", "forward", "times", "and backward", "times"):
            table.add_column(column, justify="right" if column else "left")
        ours: benchmark.Times | None = None
        with console.status("timing") as status:
            for times in benchmark.measured(inputs, found, chosen, seconds):
                ours = ours or times
                cells = [*cells_of(times.forward, ours.forward), *cells_of(times.both, ours.both)]
                table.add_row(Text(times.name + (f" ({times.why})" if times.why else "")), *cells)
                status.update(f"timing: {times.name} done")
        console.print(table)


def say(*lines: str) -> None:
    """Prints lines that only a narrow terminal wraps, without markup or highlighting."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def cells_of(ms: float | None, ours: float | None) -> tuple[str, str]:
    """The table cells of a time and of its ratio to ours."""
    if ms is None or ours is None:
        return "-", "-"
    return f"{ms:.3f}", f"{ms / ours:.2f}"


def peers_of(text: str) -> list[str]:
    """The peers in a comma-separated list, or in "none"."""
    return [] if text == "none" else named(text, benchmark.PEERS, "--peers")


def named(text: str, known: Collection[str], option: str) -> list[str]:
    """The names in a comma-separated list; raises ValueError for an unknown one."""
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in known:
            raise ValueError(f"{option} must be of {', '.join(known)}; got {name!r}")
    return chosen


def asked(text: str, sources: list[str] | None) -> BlockMask:
    """The mask on the command line; errors in the expression are reported in one line."""
    try:
        return mask_of(text, sources or ())
    except Refused as error:
        refuse(error)
        raise typer.Exit(2) from error


def place(device: str | None) -> torch.device:
    """The device that was named, or the default one."""
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device} needs a GPU that PyTorch sees; there is none")
    if chosen.type == "cuda" and chosen.index is not None:
        torch.cuda.set_device(chosen)  # timers synchronise with the current device
    return chosen


def where(mask: BlockMask) -> str:
    """The device and versions that a result was obtained with."""
    name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if mask.device.type == "cuda":
        name = torch.cuda.get_device_name(mask.device)
    return f"{name}, torch {torch.__version__}, sparseflash {__version__}"


@contextmanager
def short_errors() -> Iterator[None]:
    """Reports the library's errors in one line; no code of the user's runs inside."""
    try:
        yield
    except (ValueError, TypeError, ImportError, OSError, RuntimeError) as error:
        refuse(error)
        raise typer.Exit(2) from error


def refuse(error: Exception) -> None:
    """Prints one line on standard error."""
    Console(stderr=True).print(Text.assemble(("Error: ", "red"), str(error)), soft_wrap=True)
