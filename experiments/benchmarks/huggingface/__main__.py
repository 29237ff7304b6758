from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from experiments.benchmarks.harness import Bench, Commit, Device, Minutes, Out, Rounds, chosen, deadline
from experiments.benchmarks.huggingface import generation, measure
from experiments.benchmarks.huggingface.generation import COMPILED, DYNAMIC, STATIC, Way, same_tokens
from experiments.benchmarks.huggingface.implementations import OURS, available, release
from experiments.benchmarks.huggingface.measure import Options
from experiments.benchmarks.huggingface.shapes import GENERATED, SHAPES
from experiments.training.options import command_group

app = command_group("Models of Hugging Face Transformers of random weights, with this attention and with their own.")

Implementations = Annotated[
    list[str] | None, typer.Option("--implementation", help="eager, sdpa, flex_attention, sparseflash.")
]
Small = Annotated[bool, typer.Option("--small", help="Tiny widths, for a trial.")]


@app.command()
def models(
    model: Annotated[list[str] | None, typer.Option(help=", ".join(shape.name for shape in SHAPES))] = None,
    implementation: Implementations = None,
    tokens: Annotated[int | None, typer.Option(help="Of a row.", show_default="the model's", min=16)] = None,
    batch: Annotated[int | None, typer.Option(help="Rows, or images.", show_default="the model's", min=1)] = None,
    compile: Annotated[bool, typer.Option(help="torch.compile the models; a minute more for each.")] = False,
    rounds: Rounds = 3,
    minutes: Minutes = None,
    device: Device = "cuda",
    small: Small = False,
    commit: Commit = None,
    out: Out = Path("runs/huggingface/models.jsonl"),
) -> None:
    """Compare each model's logits and gradients with eager attention, then time forward passes and training steps.

    exactness: the largest error in units of the allowed error, twice eager attention's in the same dtype. Ends with 1
    if a model is not exact with this attention. All models take an estimated five minutes of an H100, with --compile
    twenty.
    """
    names = chosen("--model", model, [shape.name for shape in SHAPES])
    bench = _start("huggingface", device, commit, out, small, rounds)
    options = Options(tokens, batch, compile, small, deadline(minutes))
    for shape in SHAPES:
        if shape.name in names:
            measure.measure(bench, shape, implementation or available(), options, dtype_on(bench.device))
    bench.finish()
    if wrong := measure.inexact(bench.measurements):
        print(f"not exact: {', '.join(wrong)}")
        raise typer.Exit(1)


@app.command()
def generate(
    prompt: Annotated[list[int] | None, typer.Option(help="Tokens.", show_default="4096, 16384, 65536")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="May be repeated.", show_default="1, 8")] = None,
    new: Annotated[int, typer.Option(help="Tokens to generate.", min=3)] = 32,
    implementation: Implementations = None,
    compile: Annotated[bool, typer.Option(help="Also as Transformers compiles with a static cache.")] = False,
    rounds: Rounds = 3,
    minutes: Minutes = None,
    device: Device = "cuda",
    small: Small = False,
    commit: Commit = None,
    out: Out = Path("runs/huggingface/generate.jsonl"),
) -> None:
    """Generate with a Llama-shaped model: compare the tokens with eager attention's, and time them.

    On one H100 an estimated three minutes; with --compile some more. Ends with 1 if the tokens differ.
    """
    bench = _start("generate", device, commit, out, small, rounds)
    late = deadline(minutes)
    caches = [DYNAMIC, STATIC, *([COMPILED] if compile else [])]
    ways = [Way(name, cache) for cache in caches for name in implementation or ["sdpa", OURS]]
    lengths, batches = prompt or [4096, 16_384, 65_536], batch or [1, 8]
    room = max(lengths) + new
    wrong = []
    model = GENERATED.made(torch.float32, bench.device, tokens=room, small=small, check=False)
    for way, (_, found) in zip(ways, same_tokens(model, ways).items(), strict=True):
        failure = "" if found == generation.SAME else found
        value = None if failure else float(generation.CHECKED_NEW)
        bench.add(f"same-tokens/{way.path}", value, "tokens", failure=failure)
        if failure.startswith("differ") and way.implementation == OURS:
            wrong.append(str(way))
    del model
    release(bench.device)
    model = GENERATED.made(dtype_on(bench.device), bench.device, tokens=room, small=small, check=False)
    for length in lengths:
        for count in batches:
            generation.measure(bench, model, ways, length, count, new=new, late=late)
            release(bench.device)
    bench.finish()
    if wrong:
        print(f"other tokens than those of eager attention: {'; '.join(wrong)}")
        raise typer.Exit(1)


def _start(name: str, device: str, commit: str | None, out: Path, small: bool, rounds: int) -> Bench:
    try:
        import transformers
    except ImportError as error:
        raise typer.BadParameter("this needs Transformers: pip install -e '.[transformers]'") from error
    transformers.logging.set_verbosity_error()
    return Bench.start(
        name, device, commit, out, module="huggingface", rounds=rounds, round_ms=0.0 if small else 300.0,
        packages=("transformers",),
    )  # fmt: skip


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


if __name__ == "__main__":
    app()
