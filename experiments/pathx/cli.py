from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from experiments.measurements import Run, add_seed, current_run
from experiments.pathfinder.parameters import FOLDS, LRA, SIZES
from experiments.pathfinder.strokes import ORIGINAL, STYLES
from experiments.pathfinder.testset import IMAGES, test_set
from experiments.pathx import images_plot, rendering_table, weights
from experiments.pathx import table as tables
from experiments.pathx.analyse import analyse as write_analysis
from experiments.pathx.config import Config, Stage, resumed, stretched
from experiments.pathx.curricula import CURRICULA, PRESETS, curriculum, preset_of
from experiments.pathx.data.batches import pack_released, pack_strokes
from experiments.pathx.data.released import SPLITS, folder_of_fold, samples_of
from experiments.pathx.data.released import title as released_title
from experiments.pathx.data.stream import Stream
from experiments.pathx.evaluate import (
    Evaluation,
    agrees,
    baselines,
    key_of,
    measurements_of,
    pack_from_file,
    stage_for,
    store,
    trained_as,
)
from experiments.pathx.report import announcing, print_evaluated, print_paused, print_stored, print_trained
from experiments.pathx.supervision import of_model
from experiments.pathx.train import Run as Training
from experiments.pathx.train import saved_run
from experiments.training import fingerprint
from experiments.training.atomic_files import write_json, write_text
from experiments.training.cli_errors import short_errors
from experiments.training.distributed import find_device, require_single_process
from experiments.training.environment import command_line
from experiments.training.options import (
    LOCAL,
    Device,
    Overwrite,
    PauseAfter,
    Record,
    Resume,
    command_group,
    deadline,
    folder_to_resume,
    settings_as_options,
)
from experiments.training.progress_bar import counting_bar
from experiments.training.session import pausing, train_shown

DATA = Path("data/pathfinder")
RUNS = Path("runs/pathx")
RESULTS = Path("experiments/results/pathx")
WEIGHTS = Path("experiments/weights")

app = command_group("LRA-parameter generated Path-X and Path-256 with block-sparse attention.")
console = Console()


def say(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


Size = Annotated[
    int | None,
    typer.Option(help=f"Pixels along a side: {', '.join(map(str, SIZES))}.", show_default="the last stage's"),
]
Contour = Annotated[
    int | None, typer.Option(help=f"Dashes of a path: {', '.join(map(str, FOLDS))}.", show_default="the last stage's")
]
Data = Annotated[Path, typer.Option(help="Folder of the test sets; missing sets are made.")]
Workers = Annotated[
    int | None,
    typer.Option(min=0, help="Processes that make images; results do not depend on it.", show_default="cores - 1"),
]
Weights = Annotated[Path, typer.Argument(help="model.safetensors, of a run or of the repository, or its folder.")]
Hash = Annotated[
    str | None,
    typer.Option("--sha256", help="Expected hash of the file.", show_default="from the .json file beside it"),
]


@app.command()
@settings_as_options(Config)
def train(
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"A curriculum with sizes and settings: {', '.join(PRESETS)} (two minutes on a CPU core). Options of "
            "the command line come first.",
            show_default="none",
        ),
    ] = None,
    curriculum_name: Annotated[
        str | None,
        typer.Option(
            "--curriculum",
            help=f"Curriculum: {', '.join(CURRICULA)}, or a .json file with a list of stages.",
            show_default="pathx",
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Scale the stages' minutes to this sum.", show_default="unscaled")
    ] = None,
    *,
    chosen: dict[str, Any],
    workers: Workers = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default=f"{RUNS}/<curriculum>")] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    pause_after: PauseAfter = None,
) -> None:
    """Train a model through a curriculum on fresh images, and write its averaged weights.

    Minutes and images count all sessions of a run.
    """
    until = deadline(pause_after)
    with short_errors():
        require_single_process("experiments.pathx train")
        if resume:
            folder = folder_to_resume(
                out, preset=preset, curriculum=curriculum_name, minutes=minutes, overwrite=overwrite
            )
            config = resumed(saved_run(folder), chosen)
        else:
            named, settings = preset_of(preset) if preset is not None else ("pathx", {})
            curriculum_name = curriculum_name or named
            stages = curriculum(curriculum_name)
            stages = stages if minutes is None else stretched(stages, minutes)
            config = Config(curriculum=stages, **{**settings, **chosen})
            folder = out or RUNS / Path(curriculum_name).stem
        with pausing(until) as pause, Stream(workers) as stream:
            run = Training(config, folder, stream, resume=resume, overwrite=overwrite)
            run.listeners.append(announcing(console, config.curriculum))
            note = train_shown(run, lambda: run.train(pause), console, folder.name, resumed=resume)
    if note is None:
        print_paused(console, run.state, run.plan, folder)
    else:
        print_trained(console, note, folder)


@app.command()
def evaluate(
    file: Weights,
    size: Size = None,
    contour: Contour = None,
    images: Annotated[int, typer.Option(min=1, max=IMAGES, help="Use only the first images of the test set.")] = IMAGES,
    data: Data = DATA,
    sha256: Hash = None,
    device: Device = "auto",
    precision: Annotated[
        str | None, typer.Option(help="fp32 or bf16.", show_default="the run's; fp32 on a CPU, where bf16 is slow")
    ] = None,
    workers: Workers = None,
    keep: Annotated[
        bool, typer.Option("--store", help="Store the result beside the weights; only for all images.")
    ] = False,
    renderings: Annotated[
        bool, typer.Option("--renderings", help="Test the same images in every rendering; --store: renderings.md.")
    ] = False,
    release: Annotated[
        Path | None, typer.Option(help="Test on images of the arena's release in this folder.", show_default="none")
    ] = None,
    split: Annotated[str, typer.Option(help=f"Images of a release: {', '.join(SPLITS)}.")] = "test",
    strokes: Annotated[
        str, typer.Option(help=f"Strokes of the test images: {ORIGINAL}, {', '.join(STYLES)}.")
    ] = ORIGINAL,
    record: Record = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write, too.", show_default="none")] = None,
) -> None:
    """Test a model on the first images of a test set, and compare with the stored accuracy.

    Exits with 1 if the accuracies differ by more than three standard errors.
    """
    with short_errors():
        file = weights.file_in(file)
        model, config, about = weights.load(file, sha256)
        place = find_device(device)
        config = replace(config, precision=precision or ("fp32" if place.type == "cpu" else config.precision))
        stage = stage_for(config, size, contour)
        if renderings:
            if release is not None:
                raise ValueError("--renderings draws images anew, which a release cannot; leave out one of them")
            tested = made_test_set(stage.size, stage.contour, data, workers)
            say(rendering_table.HEAD)
            total = images * len(rendering_table.RENDERINGS)
            with Stream(workers) as stream, counting_bar(console, "Testing", total) as progress:
                found = rendering_table.table(
                    Evaluation(model, config, stage, stream, place), tested, images,
                    report=lambda row: say(rendering_table.line(row)), progress=progress,
                )  # fmt: skip
            say(rendering_table.spread(found))
            if keep:
                rendering_table.write(found, file.parent)
            if record is not None:
                measured = rendering_table.measurements_of(found, trained_as(stage, config, about))
                add_seed(record, run_of_test(place, config), measured)
            if out is not None:
                write_json(out, found)
            return
        path: Path | None = None
        task: str | None = None
        count = images
        if strokes != ORIGINAL:
            if keep or release is not None:
                raise ValueError("--strokes draws images of its own: leave out --store and --release")
            source: tuple[Any, ...] = pack_strokes, strokes
            task = f"{strokes} strokes, {stage.size} pixels, {stage.contour} dashes"
        elif release is not None:
            if keep or record is not None:
                raise ValueError("--store and --record keep results of test sets; write one of a release with --out")
            fold = folder_of_fold(release, stage.size, stage.contour)
            count = min(images, len(samples_of(fold, split)))
            source, task = (pack_released, fold, split), released_title(fold, stage.size, split)
        else:
            path = made_test_set(stage.size, stage.contour, data, workers)
            source = pack_from_file, path
        with Stream(workers) as stream, counting_bar(console, "Testing", count) as progress:
            evaluation = Evaluation(model, config, stage, stream, place)
            scores = evaluation.scores(*source, images=count, progress=progress)
        found = evaluation.result(scores, path, task)
        found |= {"helped": of_model(about)}
        if keep:
            store(file, stage, found)
        if record is not None:
            trained_on, supervision, layers = trained_as(stage, config, about)
            trained_on += "" if strokes == ORIGINAL else f"-{strokes}-strokes"
            measured = measurements_of(found, weights.beside(file)["cost"], (trained_on, supervision, layers))
            add_seed(record, run_of_test(place, config), measured)
        if out is not None:
            write_json(out, found)
        compares = sha256 is None and release is None and strokes == ORIGINAL
        stored = weights.beside(file)["results"].get(key_of(stage)) if compares else None
        others = baselines(stage) if strokes == ORIGINAL else ""
    print_evaluated(console, found, others)
    if stored is not None and not keep:
        same = agrees(found, stored)
        print_stored(console, stored, same=same)
        raise typer.Exit(0 if same else 1)


def run_of_test(place: torch.device, config: Config) -> Run:
    return current_run(place, command_line("experiments.pathx", without=LOCAL), seed=config.seed)


@app.command()
def testset(
    size: Annotated[int, typer.Option(help="Pixels along a side.")] = 128,
    contour: Annotated[int, typer.Option(help="Dashes of a path.")] = 14,
    every: Annotated[bool, typer.Option("--all", help="All twelve folds.")] = False,
    data: Data = DATA,
    record: Annotated[bool, typer.Option("--record", help="Record the hash of a fold that has none.")] = False,
    workers: Workers = None,
) -> None:
    """Write the test set of a fold, 20,000 images, and check its hash."""
    with short_errors():
        for chosen in [(size, contour)] if not every else [(side, length) for side in LRA for length in FOLDS]:
            path = made_test_set(*chosen, data, workers, record)
            console.print(f"{fingerprint.sha256(path)}  {path}", soft_wrap=True)


def made_test_set(size: int, contour: int, folder: Path, workers: int | None, record: bool = False) -> Path:
    with counting_bar(console, f"Test set of {size} pixels, {contour} dashes", IMAGES) as progress:
        return test_set(size, contour, folder, workers=workers or None, progress=progress, record=record)


@app.command()
def analyse(
    file: Weights,
    size: Size = None,
    contours: Annotated[str, typer.Option(help="Contour lengths to test, separated by commas.")] = "6,9,14",
    images: Annotated[int, typer.Option(min=20, max=IMAGES, help="Use only the first images of each test set.")] = 5000,
    examples: Annotated[int, typer.Option(min=0, help="Attention maps of correctly answered images.")] = 4,
    data: Data = DATA,
    sha256: Hash = None,
    device: Device = "auto",
    workers: Workers = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write.", show_default="<file's folder>/analysis")] = None,
) -> None:
    """Accuracy by contour length and marker distance beside rules that trace nothing; attention maps; mask costs."""
    with short_errors():
        file = weights.file_in(file)
        model, config, _ = weights.load(file, sha256)
        place = find_device(device)
        config = replace(config, precision="fp32" if place.type == "cpu" else config.precision)
        stages = [stage_for(config, size, int(contour)) for contour in contours.split(",")]
        folder = out or file.parent / "analysis"

        def file_of(stage: Stage) -> Path:
            return made_test_set(stage.size, stage.contour, data, workers)

        with Stream(workers) as stream:
            write_analysis(model, config, stages, file_of, images, examples, folder, stream, place)
    say((folder / "analysis.md").read_text())


@app.command("table")
def table_command(
    folders: Annotated[
        list[Path] | None, typer.Argument(exists=True, help="Folders of models with stored results.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Markdown file to write.")] = RESULTS / "table.md",
) -> None:
    """The table of results, beside published systems."""
    with short_errors():
        text = tables.markdown(tables.rows(folders or [RESULTS, WEIGHTS, RUNS]))
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, text)
    say(text)


@app.command("plot")
def plot_command(
    out: Annotated[Path, typer.Option(help="Picture to write.")] = RESULTS / "images.png",
) -> None:
    """Plot accuracy over images seen, of every stored run on Path-X from class labels."""
    with short_errors():
        found = images_plot.curves(RESULTS, WEIGHTS)
        images_plot.plot(found, out)
    for each in found:
        tested = "-" if each.tested is None else f"{100 * each.tested:.2f} %"
        say(f"{each.name}: {tested} after {each.seen:,} images")
    console.print(f"Plot: {out}", soft_wrap=True)
