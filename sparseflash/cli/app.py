"""The commands."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from sparseflash import __version__
from sparseflash.cli.names import FORMATS, PEERS, PICTURES, PRECISIONS
from sparseflash.cli.options import (
    AsJson,
    Backend,
    Device,
    HeadDim,
    Heads,
    KVHeads,
    Mask,
    Precision,
    Sources,
    pattern_names,
)
from sparseflash.cli.output import (
    asked,
    check_folder,
    check_picture,
    console,
    place,
    progress,
    say,
    say_json,
    say_table,
    short_errors,
    where,
)

# The commands import what they run, and with it PyTorch, when they run, because help should appear at once.
app = typer.Typer(
    help="Block-sparse attention masks: the cost and the reach of a mask, and exactness and speed of attention with it "
    "on this machine.\n\nMASK is a Python expression of sparseflash.masks, or a file that convert or "
    "BlockMask.save wrote: sparseflash show 'local(4096, window=512, causal=True)'",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        say(f"sparseflash {__version__}")
        raise typer.Exit


@app.callback()
def _whole(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of the command itself; `help` of the app is its text."""


_LISTED = "One or more of {}, separated by commas."


@app.command()
def info(as_json: AsJson = False) -> None:
    """Show this machine: versions, devices, which kernels are usable and why not, caches on disk."""
    from sparseflash.cli import info as machine

    with short_errors():
        found = machine.gathered()
        say_json(found) if as_json else say_table(machine.lines(found))


@app.command()
def patterns(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="The pattern to describe.", show_default="list all", autocompletion=pattern_names
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the patterns that MASK may call, or describe one of them."""
    from sparseflash.cli import patterns as library

    with short_errors():
        if name is not None:
            text = library.description(name)
            say_json({"name": name, "description": text}) if as_json else say(text)
            return
        listed = {each: library.sentence(pattern) for each, pattern in library.patterns().items()}
        say_json(listed) if as_json else say_table(listed.items())


@app.command()
def convert(
    mask: Mask,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="File to write: .mask, .npz (SciPy), .npy (dense), else with --to.")
    ],
    sources: Sources = None,
    to: Annotated[
        str | None,
        typer.Option(
            help=f"Format, one of {', '.join(FORMATS)}.",
            show_default="by the name of the file",
            autocompletion=lambda incomplete: [name for name in FORMATS if name.startswith(incomplete)],
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="The batch element to write.", show_default="all", min=0)] = None,
    head: Annotated[int | None, typer.Option(help="The head to write.", show_default="all", min=0)] = None,
    as_json: AsJson = False,
) -> None:
    """Write a mask in the format of another library, and show the contents of the file.

    A mask that the format cannot represent is refused, with the reason. Files but .mask, .npz and .npy are dictionaries
    of tensors for torch.load(OUT, weights_only=True), under the names of the library's arguments.
    """
    from sparseflash.cli import convert as converted

    with short_errors():
        check_folder(out, "OUT")
        name = converted.format_of(out, to)
    found = asked(mask, sources)
    with short_errors():
        back = converted.write(found, out, name, batch=batch, head=head)
        kept = {"file": str(out), "format": name, "bytes": out.stat().st_size, "holds": repr(back)}
        if as_json:
            say_json(kept)
        else:
            say(f"{out}: {name}, {out.stat().st_size:,} bytes", f"It holds {back!r}")


@app.command()
def show(
    mask: Mask,
    sources: Sources = None,
    head_dim: HeadDim = 64,
    heads: Heads = 1,
    dtype: Annotated[Precision, typer.Option(help="Dtype of queries, keys and values.")] = "bf16",
    causal: Annotated[
        bool, typer.Option("--causal", help="The mask must be causal: future leaks are errors, with exit status 1.")
    ] = False,
    width: Annotated[int, typer.Option(help="Width of the drawing in cells; 0: no drawing.", min=0)] = 32,
    elements: Annotated[
        bool | None,
        typer.Option(
            "--elements/--tiles", help="Draw single scores, or tiles.", show_default="scores up to 1,024 tokens"
        ),
    ] = None,
    by_head: Annotated[
        bool, typer.Option("--by-head", help="A panel for each head in the picture, equal ones, too.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help=f"Write a picture to this file: {', '.join(PICTURES)}.")] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            help="Draw who can have influenced whom after 1, 2, ... layers instead, this many; needs --picture.",
            show_default="the mask itself",
            min=1,
            max=12,
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file, to zoom into in a browser.")] = None,
    save: Annotated[Path | None, typer.Option(help="Save the mask to this file, for BlockMask.load and MASK.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the cost and the reach of a mask, and likely mistakes in it.

    Exits with status 1 if one of the mistakes is an error; warnings and notes may be intended.
    """
    with short_errors():
        if picture is not None:
            check_picture(picture)
        elif layers is not None:
            raise ValueError(f"--layers must be given with --picture FILE; got --layers {layers} alone")
        check_folder(html, "--html")
        check_folder(save, "--save")
    from sparseflash import analysis
    from sparseflash.cli import show as words
    from sparseflash.cli.inputs import DTYPES
    from sparseflash.cli.strip import strip
    from sparseflash.draw.page import to_page

    found = asked(mask, sources)
    sizes: dict[str, Any] = {"head_dim": head_dim, "heads": heads, "dtype": DTYPES[dtype], "causal": causal}
    with short_errors():
        if not as_json:
            say(found.to_string(width) if width else repr(found))
            say_table(words.facts(found, **sizes))
        findings = analysis.lint(found, causal=causal)
        if as_json:
            say_json({**words.figures(found, **sizes), "findings": [asdict(each) for each in findings]})
        else:
            say(*map(str, findings))
        written = {"Picture": picture, "Page": html, "Mask": save}
        if picture is not None:
            if layers is None:
                found.plot(elements=elements, by_head=by_head).savefig(picture)
            else:
                strip(found, layers, elements=elements).savefig(picture)
        if html is not None:
            page = to_page(found, mask, costs=words.facts(found, **sizes))
            html.write_text(page, encoding="utf-8")
        if save is not None:
            found.save(save)
        if not as_json:
            say(*(f"{what}: {file}" for what, file in written.items() if file is not None))
    if any(each.severity == "error" for each in findings):
        raise typer.Exit(1)


@app.command()
def check(
    mask: Mask,
    sources: Sources = None,
    head_dim: HeadDim = 64,
    heads: Heads = 2,
    kv_heads: KVHeads = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=_LISTED.format(", ".join(PRECISIONS)), show_default="all on a GPU, fp32 on a CPU"),
    ] = None,
    backend: Annotated[
        Backend | None,
        typer.Option(help="The backend to check.", show_default="triton on a GPU, blockwise on a CPU"),
    ] = None,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Several head dims, grouped heads and draws, too.")
    ] = False,
    keep: Annotated[
        Path | None,
        typer.Option("--certificate", metavar="FILE", help="Write what was found to this file, as JSON, to keep."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare attention with a mask, and its gradients, with dense attention in fp64.

    Errors are relative to the allowed error: twice the error of a plain implementation in the same precision, plus
    about one unit in the last place. Exits with status 1 if any of them is above 1.
    """
    from sparseflash.cli import certificate

    with short_errors():
        check_folder(keep, "--certificate")
    found = asked(mask, sources)
    with short_errors():
        found = found.to(place(device))
        gpu = found.device.type == "cuda"
        dtypes = named(dtype, PRECISIONS, "--dtype") if dtype is not None else list(PRECISIONS) if gpu else ["fp32"]
        cases = certificate.cases_of(found, heads, kv_heads, dtypes, head_dim, seed, thorough=thorough)
        results = []
        with progress.status("comparing with fp64") as status:
            for case in cases:
                results.append((case, certificate.errors_of(found, case, backend)))
                status.update(f"comparing with fp64: {len(results)} of {len(cases)}")
        kept = certificate.certificate(found, results, backend, where(found))
        if keep is not None:
            keep.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
        if as_json:
            say_json(kept)
        else:
            say(f"{found!r}", f"{where(found)}: errors relative to the allowed error")
            console.print(certificate.table(results, thorough))
            console.print(
                "Exact: no error is larger than allowed."
                if kept["exact"]
                else Text("Not exact: an error is larger than allowed.", "bold red")
            )
            say(*([] if keep is None else [f"Certificate: {keep}"]))
    if not kept["exact"]:
        raise typer.Exit(1)


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
        typer.Option(help=f"{_LISTED.format(', '.join(PEERS))} none: no other.", show_default="all that fit"),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Duration of each measurement.", min=0.01)] = 0.5,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Time attention with a mask against dense attention and other libraries, after checking that it is exact.

    One head is checked; for long masks only the last 16,384 queries and keys (4,096 on a CPU); `check` takes all of
    them. Times are medians of warm calls, in milliseconds, host and device together. On a CPU the backend is blockwise,
    which saves memory and is not fast.
    """
    import torch

    from sparseflash.cli import bench as benchmark
    from sparseflash.cli import certificate
    from sparseflash.cli.inputs import DTYPES, drawn

    found = asked(mask, sources)
    with short_errors():
        found = found.to(place(device))
        dtype = dtype or ("bf16" if found.device.type == "cuda" else "fp32")
        chosen = benchmark.peers_for(found) if peers is None else peers_of(peers)
        compared = benchmark.corner(found)
        with progress.status(f"comparing {compared.q_len:,} queries and {compared.k_len:,} keys with fp64"):
            (case,) = certificate.cases_of(compared, 1, None, [dtype], head_dim, seed, thorough=False)
            errors = certificate.errors_of(compared, case)
        if not all(error <= 1 for error in errors.values()):
            raise ValueError(f"attention with this mask must be exact to be timed; got the errors {errors}")
        precision = DTYPES[dtype]
        inputs = drawn(found, batch=batch, heads=heads, kv_heads=kv_heads, dim=head_dim, dtype=precision, seed=seed)
        shape = " x ".join(str(size) for size in inputs.q.shape)
        shapes = f"{shape}, {inputs.k.shape[1]} key heads, {precision}"
        measured = []
        with progress.status("timing") as status:
            for times in benchmark.measured(inputs, found, chosen, seconds):
                measured.append(times)
                status.update(f"timing: {times.name} done")
        if as_json:
            listed: list[dict[str, Any]] = [asdict(times) for times in measured]
            say_json({"mask": repr(found), "device": where(found), "inputs": shapes, "milliseconds": listed})
            return
        say(
            f"{found!r}",
            f"{where(found)}; {shapes}",
            "ms; times: this time over that of sparseflash, above 1 it is slower",
        )
        console.print(benchmark.table(measured))
        if found.device.type == "cpu":
            say("On a CPU sparseflash saves memory; it is not made for speed there. The kernels need an NVIDIA GPU.")
            if torch.get_num_threads() > 1:
                say("If other programs keep the cores busy, OMP_NUM_THREADS=1 may be many times as fast.")


def peers_of(text: str) -> list[str]:
    """The peers in a comma-separated list, or in "none"."""
    return [] if text == "none" else named(text, PEERS, "--peers")


def named(text: str, known: Collection[str], option: str) -> list[str]:
    """The names in a comma-separated list; raises ValueError for an unknown one."""
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in known:
            raise ValueError(f"{option} must be of {', '.join(known)}; got {name!r}")
    return chosen
