"""The commands: measure case after case, and write the page after each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import torch

    from experiments.benchmarks.huggingface.generation import Row as GenerationRow
    from experiments.benchmarks.huggingface.measure import Row as ModelRow

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
console = Console(width=120)

Implementations = Annotated[
    list[str] | None,
    typer.Option("--implementation", help="eager, sdpa, flex_attention, sparseflash; may be repeated."),
]
Device = Annotated[str, typer.Option(help="cuda, in bf16; or cpu, in fp32, for a trial.")]
Small = Annotated[bool, typer.Option("--small", help="Tiny widths, for a trial.")]
Minutes = Annotated[float | None, typer.Option(help="Begin nothing after so many.", show_default="no limit")]
Rounds = Annotated[int, typer.Option(help="Turns of each implementation.", min=1)]
Commit = Annotated[str | None, typer.Option(help="The commit to note.", show_default="git's")]
Out = Annotated[Path, typer.Option(help="Folder for the page and the CSV file.")]


@app.callback()
def main() -> None:
    """Models of Hugging Face Transformers of random weights, with this attention and with their own."""


@app.command()
def models(
    model: Annotated[
        list[str] | None, typer.Option(help="llama, gpt2, t5, swin, gemma2, gpt-oss, bert; may be repeated.")
    ] = None,
    implementation: Implementations = None,
    tokens: Annotated[int | None, typer.Option(help="Of a row.", show_default="the model's", min=16)] = None,
    batch: Annotated[int | None, typer.Option(help="Rows, or images.", show_default="the model's", min=1)] = None,
    compile: Annotated[bool, typer.Option(help="torch.compile the models; a minute more for each.")] = False,
    rounds: Rounds = 3,
    minutes: Minutes = None,
    device: Device = "cuda",
    small: Small = False,
    commit: Commit = None,
    out: Out = Path("runs/huggingface"),
) -> None:
    """Compare each model's logits and gradients with eager attention, then time forward passes and training steps.

    All models on one H100 take an estimated five minutes, most of them compiling; with --compile twenty. What cannot
    run is a row with its reason. Ends with 1 if a model is not exact with this attention.
    """
    place, dtype = _place(device)
    from experiments.benchmarks.huggingface.implementations import available
    from experiments.benchmarks.huggingface.measure import Options, inexact, measure
    from experiments.benchmarks.huggingface.report import models_page, write
    from experiments.benchmarks.huggingface.shapes import SHAPES

    chosen = [shape for shape in SHAPES if not model or shape.name in model]
    _refuse_unknown("--model", model, [shape.name for shape in SHAPES])
    names = implementation or available()
    options = Options(
        tokens=tokens, batch=batch, compiles=compile, small=small, rounds=rounds, round_ms=0.0 if small else 300.0,
        deadline=_deadline(minutes),
    )  # fmt: skip
    facts = _facts(place, commit) | {
        "compiled": "yes" if compile else "no", "dtype": str(dtype).removeprefix("torch."),
        "size": "tiny, for a trial" if small else "; ".join(
            f"{shape.name} {batch or shape.batch} x {tokens or shape.tokens:,}" if shape.tokens
            else f"{shape.name} {batch or shape.batch} images" for shape in chosen
        ),
    }  # fmt: skip
    rows: list[ModelRow] = []
    for shape in chosen:
        rows += measure(shape, names, options, place, dtype, _say)
        write(out, "models", models_page(rows, chosen, facts), rows)
    _print_models(rows)
    if wrong := inexact(rows):
        console.print(f"not exact: {', '.join(wrong)}")
        raise typer.Exit(1)


@app.command()
def generate(
    prompt: Annotated[
        list[int] | None, typer.Option(help="May be repeated.", show_default="4096, 16384, 65536")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="May be repeated.", show_default="1, 8")] = None,
    new: Annotated[int, typer.Option(help="Tokens to generate.", min=3)] = 32,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    heads: Annotated[int, typer.Option(help="Of queries.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="Of keys.")] = 8,
    dim: Annotated[int, typer.Option(help="Head dim.")] = 128,
    implementation: Implementations = None,
    compile: Annotated[bool, typer.Option(help="Also as Transformers compiles with a static cache.")] = False,
    check: Annotated[bool, typer.Option(help="First compare tokens with those of eager attention.")] = True,
    rounds: Rounds = 3,
    minutes: Minutes = None,
    device: Device = "cuda",
    small: Small = False,
    commit: Commit = None,
    out: Out = Path("runs/huggingface"),
) -> None:
    """Generate with a Llama-shaped model: are the tokens those of eager attention, and how long do they take?

    On one H100 an estimated three minutes; with --compile some more. Ends with 1 if the tokens are others.
    """
    place, dtype = _place(device)
    import torch

    from experiments.benchmarks.huggingface.generation import COMPILED, DYNAMIC, STATIC, Way, measure, same_tokens
    from experiments.benchmarks.huggingface.implementations import OURS, release
    from experiments.benchmarks.huggingface.report import generate_page, write
    from experiments.benchmarks.huggingface.shapes import generating

    deadline = _deadline(minutes)
    shape = generating(layers, heads, kv_heads, dim, small=small)
    caches = [DYNAMIC, STATIC, *([COMPILED] if compile else [])]
    ways = [Way(name, cache) for cache in caches for name in implementation or ["sdpa", OURS]]
    facts = _facts(place, commit) | {
        "dtype": str(dtype).removeprefix("torch."), "tokens": f"{new} new ones; medians of {rounds} turns",
    }  # fmt: skip
    lengths, batches = prompt or [4096, 16_384, 65_536], batch or [1, 8]
    room = max(lengths) + new
    rows: list[GenerationRow] = []
    checks: dict[str, str] = {}
    if check:
        model = shape.made(torch.float32, place, tokens=room, small=small, check=False)
        checks = same_tokens(model, ways)
        for name, found in checks.items():
            _say(f"{name}: {found}")
        del model
        release(place)
    model = shape.made(dtype, place, tokens=room, small=small, check=False)
    for length in lengths:
        for count in batches:
            rows += measure(
                model, ways, length, count, new=new, rounds=rounds, device=place,
                late=lambda: time.monotonic() > deadline, say=_say,
            )  # fmt: skip
            write(out, "generate", generate_page(rows, checks, shape.words, facts), rows)
            release(place)
    _print_generated(rows)
    if wrong := [name for name, found in checks.items() if name.startswith(OURS) and found.startswith("differ")]:
        console.print(f"other tokens than those of eager attention: {'; '.join(wrong)}")
        raise typer.Exit(1)


def _say(text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _deadline(minutes: float | None) -> float:
    return float("inf") if minutes is None else time.monotonic() + 60 * minutes


def _place(device: str) -> tuple[torch.device, torch.dtype]:
    """The device and the dtype, once Transformers is there."""
    try:
        import transformers
    except ImportError as error:
        raise typer.BadParameter("this needs Transformers: pip install -e '.[transformers]'") from error
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device; --device cpu --small tries the experiment")
    transformers.logging.set_verbosity_error()
    return torch.device(device), torch.bfloat16 if device.startswith("cuda") else torch.float32


def _refuse_unknown(option: str, given: list[str] | None, known: list[str]) -> None:
    if unknown := sorted(set(given or ()) - set(known)):
        raise typer.BadParameter(f"{option} must be of {', '.join(known)}; got {', '.join(unknown)}")


def _facts(device: torch.device, commit: str | None) -> dict[str, str]:
    import transformers

    from experiments.training.environment import command_line, environment

    command = command_line("experiments.benchmarks.huggingface")
    return environment(device, command, commit) | {"transformers": transformers.__version__}


def _print_models(rows: list[ModelRow]) -> None:
    from experiments.benchmarks.huggingface.report import summary

    table = Table("model", "implementation", box=box.SIMPLE)
    for column in ("error", "forward, a second", "training step, a second", "peak, GiB"):
        table.add_column(column, justify="right")
    for name in dict.fromkeys(row.model for row in rows):
        for cells in summary([row for row in rows if row.model == name]):
            table.add_row(name, *cells)
    console.print(table)


def _print_generated(rows: list[GenerationRow]) -> None:
    table = Table("prompt", "batch", "implementation", box=box.SIMPLE)
    for column in ("prompt, tokens/s", "ms a token"):
        table.add_column(column, justify="right")
    table.add_column("reason")
    for row in rows:
        numbers = ["", ""] if row.failure else [f"{row.prompt_rate:,.0f}", f"{row.token_ms:.2f}"]
        table.add_row(f"{row.prompt:,}", str(row.batch), row.implementation, *numbers, row.failure[:60])
    console.print(table)
