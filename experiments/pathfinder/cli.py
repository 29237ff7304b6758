from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from experiments.pathfinder import original
from experiments.pathfinder.generate import Settings, generate
from experiments.pathfinder.parameters import FOLDS, LRA, Parameters, parameters_of
from experiments.pathfinder.picture import picture
from experiments.pathfinder.release import export
from experiments.pathfinder.report import shortcuts_report, statistics_report
from experiments.pathfinder.shortcuts import Shortcut, pairs, shortcuts
from experiments.pathfinder.statistics import statistics
from experiments.pathfinder.vectors import load
from experiments.training.cli_errors import short_errors
from experiments.training.options import command_group
from experiments.training.progress_bar import counting_bar
from experiments.training.workers import available_cores

DATA = Path("data/pathfinder")
SETS = 4  # each as large as the original's

app = command_group("Pathfinder images with the Long Range Arena's parameters: generated, not the released ones.")
console = Console()

Size = Annotated[int, typer.Option(help=f"Height and width in pixels: {', '.join(map(str, LRA))}.")]
Contour = Annotated[int, typer.Option(help=f"Dashes of a path, its difficulty: {', '.join(map(str, FOLDS))}.")]
Out = Annotated[Path, typer.Option(help="The files' folder.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Processes; the files do not depend on it.", show_default="all cores")
]
Seed = Annotated[int, typer.Option(help="Image i of a seed is always the same.")]
Report = Annotated[Path | None, typer.Option(help="Markdown file to write as well.", show_default="none")]
Only = Annotated[
    list[str] | None, typer.Option(help="SIZE-CONTOUR, such as 128-14; may be repeated.", show_default="all twelve")
]


@app.command("generate")
def generate_command(
    size: Size = 128,
    contour: Contour = 14,
    parameters: Annotated[
        Path | None,
        typer.Option(help="JSON file of all parameters, instead of --size and --contour.", show_default="none"),
    ] = None,
    images: Annotated[int, typer.Option(help="Number of images.")] = Settings.images,
    seed: Seed = 0,
    out: Out = DATA,
    workers: Workers = None,
) -> None:
    """Write images as vectors into one file. A stopped run resumes."""
    with short_errors():
        if out.suffix in (".npz", ".npy", ".safetensors"):
            raise ValueError(f"--out must be a folder, in which the file gets a name of its own; got {out}")
        chosen = parameters_of(size, contour) if parameters is None else Parameters.read(parameters)
        path = generated(Settings(chosen, images, seed), out, workers)
    console.print(f"Generated images (not the released ones): {path}", soft_wrap=True)


@app.command("export")
def export_command(
    file: Annotated[Path, typer.Argument(help="A file written by `generate`.")],
    out: Out = DATA / "released-layout",
) -> None:
    """Write the images of a file as PNG files with metadata, in the folders of the Long Range Arena's release."""
    with short_errors():
        vectors = load(file)
        with counting_bar(console, "Writing PNG files", len(vectors)) as progress:
            folder = export(vectors, out, progress=progress)
    console.print(f"Generated images (not the released ones): {folder}", soft_wrap=True)


@app.command("statistics")
def statistics_command(
    only: Only = None, images: int = 1000, seed: Seed = 0, data: Out = DATA, workers: Workers = None, out: Report = None
) -> None:
    """Compare statistics of newly generated images with the original generator's."""
    with short_errors():
        found = []
        for parameters in chosen_parameters(only):
            vectors = load(generated(Settings(parameters, images, seed), data, workers))
            found.append((parameters, images, statistics(vectors)))
        publish(statistics_report(found), out)


@app.command("shortcuts")
def shortcuts_command(
    only: Only = None,
    images: int = 10_000,
    seed: Seed = 0,
    data: Out = DATA,
    workers: Workers = None,
    out: Report = None,
) -> None:
    """Measure accuracies without tracing a path, on newly generated images."""
    with short_errors():
        found, compared = [], []
        for parameters in chosen_parameters(only):
            key = (parameters.size, parameters.contour_length)
            set_size = original.SHORTCUTS.get(key, (0,))[0]
            needed = max(images, SETS * set_size)
            examples = pairs(load(generated(Settings(parameters, needed, seed), data, workers)))
            found.append((parameters, shortcuts(examples[:images])))
            if set_size:
                sets = [shortcuts(examples[number * set_size : (number + 1) * set_size]) for number in range(SETS)]
                compared.append((parameters, SETS, [mean(rule) for rule in zip(*sets)]))
        publish(shortcuts_report(found, compared), out)


@app.command("picture")
def picture_command(
    size: Size = 128,
    contour: Contour = 14,
    seed: Seed = 0,
    real: Annotated[
        Path | None, typer.Option(help="A strip of eight real tiles to show below.", show_default="none")
    ] = None,
    enlarge: Annotated[int, typer.Option(min=1, help="Picture pixels for each image pixel.")] = 1,
    data: Out = DATA,
    workers: Workers = None,
    out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("pathfinder.png"),
) -> None:
    """Draw eight generated images, above real ones if given."""
    with short_errors():
        vectors = load(generated(Settings(parameters_of(size, contour), 200, seed), data, workers))
        picture(vectors, out, real=real, enlarge=enlarge)
    console.print(str(out), soft_wrap=True)


def generated(settings: Settings, parent: Path, workers: int | None) -> Path:
    name = f"Drawing {settings.parameters.name} on {workers or available_cores()} cores"
    with counting_bar(console, name, settings.images) as progress:
        return generate(settings, parent, workers=workers, progress=progress)


def chosen_parameters(only: list[str] | None) -> list[Parameters]:
    if only is None:
        return [parameters_of(size, contour) for size in LRA for contour in FOLDS]
    found = []
    for name in only:
        size, _, contour = name.partition("-")
        if not (size.isdecimal() and contour.isdecimal()):
            raise ValueError(f"--only must be size and contour length, as 128-14; got {name!r}")
        found.append(parameters_of(int(size), int(contour)))
    return found


def mean(sets: tuple[Shortcut, ...]) -> Shortcut:
    return replace(sets[0], accuracy=float(np.mean([shortcut.accuracy for shortcut in sets])))


def publish(text: str, out: Path | None) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
