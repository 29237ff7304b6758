"""The command line: options only."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments.lm import bench, bench_report, session
from experiments.lm.cases import DEFAULT, parsed
from experiments.lm.config import Config, configure, resumed
from experiments.lm.presets import PRESETS
from experiments.lm.train import saved_config
from experiments.training import tensorboard
from experiments.training.cli_errors import short_errors
from experiments.training.distributed import find_device, process_group, require_single_process
from experiments.training.environment import environment
from experiments.training.options import (
    Device,
    Overwrite,
    PauseAfter,
    Resume,
    TensorBoard,
    command_group,
    deadline,
    settings_as_options,
)
from experiments.training.session import pausing

RUNS = Path("runs/lm")

app = command_group("Language models with block-sparse attention.")
console = Console()


@app.callback()
def main() -> None:
    """Language models with block-sparse attention."""


@app.command()
@settings_as_options(Config)
def train(
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"Sizes to start from, which other options change: {', '.join(PRESETS)}.", show_default="124M's"
        ),
    ] = None,
    *,
    chosen: dict[str, Any],
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of UTF-8 files, or of tokens that `corpus` has made.", show_default="needed"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run.", show_default=f"{RUNS}/<preset>-<pattern>-<context>")
    ] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    pause_after: PauseAfter = None,
    tensorboard_files: TensorBoard = False,
) -> None:
    """Train a language model on text, and write its validation loss. A preset changes the defaults below.

    On several GPUs of one machine: torchrun --nproc-per-node=2 -m experiments.lm train ..., with --sharding fsdp if
    weights and optimiser should be divided among them.
    """
    with short_errors():
        if tensorboard_files:
            tensorboard.writer_class()  # raises an error, if any, before anything is written
        if resume:
            if preset or overwrite:
                raise ValueError("--resume keeps the run's settings: leave out --preset and --overwrite")
            if out is None:
                raise ValueError("--resume needs --out, the folder of the run")
            saved, saved_data = saved_config(out)
            config, data = resumed(saved, chosen), data or saved_data
        else:
            config = configure(preset, chosen)
            if config.steps is None and config.minutes is None:
                raise ValueError("a run must have an end: give --minutes or --steps")
        if data is None:
            raise ValueError("--data must name a folder of text; make one with: python -m experiments.lm corpus")
        folder = out or RUNS / default_name(preset, config)
        until = deadline(pause_after)
        with process_group(config.device) as ranks:
            console.quiet = not ranks.first
            store = session.find_tokens(config, data, ranks, console)
            with pausing(until) as pause:
                metrics = session.train(
                    config, store, folder, resume=resume, overwrite=overwrite, pause=pause, ranks=ranks,
                    tensorboard=tensorboard_files, console=console,
                )  # fmt: skip
            if metrics is None:
                console.print(f"Go on with: train --resume --out {folder}", soft_wrap=True)
            else:
                console.print(
                    f"Validation loss {metrics['val_loss']:.4f} after {metrics['tokens']:,} tokens in "
                    f"{metrics['seconds'] / 60:.1f} minutes: {folder}/metrics.json",
                    soft_wrap=True, highlight=False,
                )  # fmt: skip


def default_name(preset: str | None, config: Config) -> str:
    """The folder of a run that has no --out."""
    pattern = config.pattern.replace("|", "-or-").replace(",", "-then-").replace("/", "-and-")
    return f"{preset or 'default'}-{pattern}-{config.context}"


@app.command("bench")
@settings_as_options(
    Config, "head_dim", "positions", "vocabulary", "window", "block", "compiled", "precision", "micro_tokens"
)
def bench_command(
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="presets:contexts:patterns:implementations, with commas between several, such as "
            f"{DEFAULT[0]}; may be repeated. In a pattern, + joins layers that take turns.",
            show_default="what the README's table shows",
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Time limit; rows that did not begin say so.")] = 5.0,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step, at least one sequence.")] = 65_536,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each row.")] = 3,
    *,
    chosen: dict[str, Any],
    device: Device = "auto",
    commit: Annotated[str | None, typer.Option(help="The commit to note.", show_default="git's")] = None,
    out: Annotated[Path, typer.Option(help="Folder for bench.csv and bench.json.")] = RUNS / "bench",
) -> None:
    """Measure whole training steps on random tokens: tokens/s, MFU and memory, in turns."""
    with short_errors():
        require_single_process("bench")
        place = find_device(device)
        cases = [each for text in case or DEFAULT for each in parsed(text)]
        options = bench.Options(minutes, tokens, rounds, chosen=chosen)
        command = shlex.join(["python", "-m", "experiments.lm", *sys.argv[1:]])
        facts = environment(place, command, commit)
        rows = bench.measure(cases, options, place, lambda text: console.print(text, soft_wrap=True, highlight=False))
        bench_report.write(out, rows, facts, {"minutes": minutes, "tokens": tokens, "rounds": rounds, **chosen})
    console.print(bench_report.table(rows))
    console.print(f"{facts['device']}, torch {facts['torch']}: {out}/bench.csv, bench.json", soft_wrap=True)
