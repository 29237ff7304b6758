"""`python -m experiments.benchmarks.io`: the tables of operations, bytes and milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:  # modules that import PyTorch are imported where they are needed, so that --help is quick
    from experiments.benchmarks.io.cases import Case

app = typer.Typer(
    help="What attention costs: operations, bytes, milliseconds; the FlashAttention paper's figure 2.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

RESULTS = Path("experiments/results/io")

Out = Annotated[Path, typer.Option(help="Folder for the CSV file, the page and the plot.")]
Counters = Annotated[bool, typer.Option(help="Count bytes by ncu where it is installed; seconds a case.")]


@app.command()
def table(
    batch: Annotated[int, typer.Option(min=1)] = 64,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    length: Annotated[int, typer.Option(help="Tokens.", min=16)] = 1024,
    dim: Annotated[int, typer.Option(help="Head dim.", min=16, max=256)] = 64,
    block: Annotated[int, typer.Option(help="Tokens a tile of the mask: the smaller, the lower densities go.")] = 64,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    counters: Counters = True,
    out: Out = RESULTS,
) -> None:
    """Standard attention, ours dense and ours butterfly at every density, at one shape, by default the paper's."""
    from experiments.benchmarks.io.cases import DENSE, every_density

    _run("table", every_density(_case(DENSE, batch, heads, length, dim, block, dtype)), counters, out)


@app.command()
def theorem(
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    length: Annotated[int, typer.Option(help="Tokens.", min=16)] = 16384,
    dim: Annotated[
        list[int] | None, typer.Option(help="Head dim; may be repeated.", show_default="32, 64, 128")
    ] = None,
    block: Annotated[int, typer.Option(help="Tokens a tile of the mask.")] = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    counters: Counters = True,
    out: Out = RESULTS,
) -> None:
    """Bytes over density and head dim beside those of the IO theorem, at a size that the cache cannot hold."""
    from experiments.benchmarks.io.cases import DENSE, every_density

    cases = [
        case
        for d in dim or (32, 64, 128)
        for case in every_density(_case(DENSE, batch, heads, length, d, block, dtype))
    ]
    _run("theorem", cases, counters, out)


@app.command(hidden=True, context_settings={"ignore_unknown_options": True})
def one(passes: str, words: list[str]) -> None:
    """Runs one case, so that ncu sees its kernels and no others."""
    import torch

    from experiments.benchmarks.io.cases import of_words
    from experiments.benchmarks.io.implementations import calls_of

    call = getattr(calls_of(of_words(words), torch.device("cuda")), passes)
    for _ in range(2):
        call()  # compiles and plans
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _case(kind: str, batch: int, heads: int, length: int, dim: int, block: int, dtype: str) -> Case:
    import torch

    from experiments.benchmarks.io.cases import Case

    if dtype not in ("bfloat16", "float16", "float32"):
        raise typer.BadParameter(f"--dtype must be bfloat16, float16 or float32; got {dtype}")
    if length % block:
        raise typer.BadParameter(
            f"--length must be a multiple of --block, as the model counts; got {length} and {block}"
        )
    return Case(kind, None, batch, heads, length, dim, block, getattr(torch, dtype))


def _run(name: str, cases: list[Case], counters: bool, out: Path) -> None:
    import torch

    from experiments.benchmarks.io import report
    from experiments.benchmarks.io.measuring import largest_difference, measure
    from experiments.training.environment import command_line, environment
    from experiments.training.progress_bar import counting_bar

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and out == RESULTS:
        raise typer.BadParameter(
            f"a test on the CPU must not replace what is in {RESULTS}: name another folder by --out"
        )
    facts = environment(device, command_line("experiments.benchmarks.io"), None)
    if device.type == "cpu":
        facts["note"] = "no GPU: milliseconds are the CPU backend's, bytes the model's"
    facts["largest difference of ours from standard attention"] = (
        f"{largest_difference(cases[0], device):.2g} of the largest value"
    )
    with counting_bar(console, "Counting and timing", len(cases) + 1) as progress:
        count = iter(range(1, len(cases) + 2))
        rows = measure(cases, device, counters=counters and device.type == "cuda", done=lambda: progress(next(count)))
    out.mkdir(parents=True, exist_ok=True)
    report.frame(rows).to_csv(out / f"{name}.csv", index=False, float_format="%.6g")
    page = report.markdown(rows, facts)
    (out / f"{name}.md").write_text(page)
    report.plot(rows, out / f"{name}.png")
    console.print(page, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Written: {out / name}.csv, .md and .png", soft_wrap=True)


if __name__ == "__main__":
    app()
