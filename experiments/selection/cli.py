from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.measurements import add_seed, current_run
from experiments.selection.layers import LAYERS, layer_of
from experiments.selection.report import measurements_of, save_plot, table
from experiments.selection.train import PRESETS, train
from experiments.training.atomic_files import write_json, write_text
from experiments.training.cli_errors import short_errors
from experiments.training.distributed import find_device
from experiments.training.environment import command_line, device_name, versions
from experiments.training.options import LOCAL, Record

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def compare(
    preset: Annotated[str, typer.Option(help=f"Sizes and steps: {', '.join(PRESETS)}.")] = "cpu",
    way: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Models to train, by default all: {', '.join(LAYERS)}; or a pattern of the library or of your own, "
            "without keys after their query: 'streaming(n, window=64, sink=4)' for n tokens, mine.py:rule."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/selection"),
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="cuda for the preset gpu, else cpu")
    ] = None,
    seed: int = 0,
    steps: Annotated[int | None, typer.Option(help="Steps of each model, by default those of the preset.")] = None,
    block: Annotated[
        int | None, typer.Option(help="Tokens of a block; as many keys a query as the preset has.")
    ] = None,
    unmarked: Annotated[bool, typer.Option("--unmarked", help="Queries do not share an embedding.")] = False,
    record: Record = None,
) -> None:
    """Train models that choose blocks on associative recall, beside fixed patterns and dense attention."""
    with short_errors():
        if preset not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {preset!r}.")
        settings = PRESETS[preset].changed(block=block, marked=not unmarked, steps=steps)
        for each in way or ():
            layer_of(each, settings.sizes)  # raises an error, if any, before anything is trained
        place = find_device(device or ("cuda" if preset == "gpu" else "cpu"))
        out.mkdir(parents=True, exist_ok=True)
        results: list[dict[str, Any]] = []
        print(table(results), flush=True)
        made = {
            "device": device_name(place),
            **versions(),
            "preset": preset,
            "seed": seed,
            "block": settings.sizes.block,
            "marked": settings.marked,
        }
        for each in way or list(LAYERS):
            results.append(train(each, settings, place, seed, _report))
            print(table(results[-1:]).splitlines()[-1], flush=True)
            # After each model, so that Ctrl-C or an error loses only the current one.
            write_json(out / "results.json", {**made, "results": results})
            write_text(out / "table.md", table(results) + "\n")
            save_plot(results, out / "recall.png")
        if record is not None:
            run = current_run(place, command_line("experiments.selection", without=LOCAL), seed=seed)
            add_seed(record, run, [found for each in results for found in measurements_of(each)])


def _report(measured: dict[str, Any]) -> None:
    step, loss, right, found = (measured[name] for name in ("step", "loss", "accuracy", "found"))
    print(f"step {step}: loss {loss:.3f}, {right:.1%} right, {found:.1%} of blocks found", file=sys.stderr, flush=True)
