"""The command line: options only. What they do is in the modules that the commands are named after."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from experiments.lra import board
from experiments.lra.errors import short_errors
from experiments.lra.files import replace_text, write_json
from experiments.lra.progress import TrainingBar, counting_bar
from experiments.lra.ranks import find_device, refuse_many
from experiments.lra.runlog import Record
from experiments.lra.tensorfile import sha256
from experiments.lra.termination import told_to_end
from experiments.pathfinder.parameters import FOLDS, LRA
from experiments.pathx import probe as probing
from experiments.pathx import table as tables
from experiments.pathx import weights
from experiments.pathx.analyse import analyse as write_analysis
from experiments.pathx.analyse import percent
from experiments.pathx.config import HELP, SHOWN_DEFAULTS, Config, Stage, resumed, stretched
from experiments.pathx.curricula import CURRICULA, curriculum
from experiments.pathx.evaluate import agrees, baselines, key_of, result, scores_on, stage_for, store
from experiments.pathx.helped import helped_of, told
from experiments.pathx.stream import Stream
from experiments.pathx.testset import IMAGES, test_set
from experiments.pathx.train import Run, saved_run

DATA = Path("data/pathfinder")
RUNS = Path("runs/pathx")
RESULTS = Path("experiments/results/pathx")

app = typer.Typer(
    help="LRA-parameter generated Path-X and Path-256 with block-sparse attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()


def option(name: str, *names: str) -> Any:
    """An option that sets a field of Config; None where the user leaves it out."""
    return typer.Option(*names, help=HELP[name], show_default=SHOWN_DEFAULTS[name])


Size = Annotated[
    int | None, typer.Option(help=f"Pixels along a side: {', '.join(map(str, LRA))}.", show_default="the last stage's")
]
Contour = Annotated[
    int | None, typer.Option(help=f"Dashes of a path: {', '.join(map(str, FOLDS))}.", show_default="the last stage's")
]
Data = Annotated[Path, typer.Option(help="Folder of the test sets; what is missing is made.")]
Workers = Annotated[
    int | None,
    typer.Option(min=0, help="Processes that make images; results do not depend on it.", show_default="cores - 1"),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU if PyTorch sees one.")]
Weights = Annotated[Path, typer.Argument(help="model.safetensors of a run, or a file that ships with the repository.")]
Hash = Annotated[
    str | None, typer.Option("--sha256", help="What the file must be.", show_default="that in the .json file beside it")
]


@app.command()
def train(
    context: typer.Context,
    curriculum_name: Annotated[
        str | None,
        typer.Option(
            "--curriculum",
            help=f"Stages: {', '.join(CURRICULA)}, or a .json file with a list of them.",
            show_default="pathx",
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Scale the stages' minutes to this sum.", show_default="as they are")
    ] = None,
    layers: Annotated[str | None, option("layers")] = None,
    block: Annotated[int | None, option("block")] = None,
    registers: Annotated[int | None, option("registers")] = None,
    width: Annotated[int | None, option("width")] = None,
    heads: Annotated[int | None, option("heads")] = None,
    head_dim: Annotated[int | None, option("head_dim")] = None,
    mlp: Annotated[int | None, option("mlp")] = None,
    dropout: Annotated[float | None, option("dropout")] = None,
    auxiliary: Annotated[float | None, option("auxiliary")] = None,
    hidden: Annotated[float | None, option("hidden")] = None,
    answers: Annotated[float | None, option("answers")] = None,
    weight_decay: Annotated[float | None, option("weight_decay")] = None,
    clip: Annotated[float | None, option("clip")] = None,
    average: Annotated[float | None, option("average")] = None,
    seed: Annotated[int | None, option("seed")] = None,
    initial: Annotated[str | None, option("initial")] = None,
    device: Annotated[str | None, option("device")] = None,
    precision: Annotated[str | None, option("precision")] = None,
    compiled: Annotated[bool | None, option("compiled", "--compiled/--no-compiled")] = None,
    recorded: Annotated[bool | None, option("recorded")] = None,
    log_every: Annotated[int | None, option("log_every")] = None,
    validate_every: Annotated[int | None, option("validate_every")] = None,
    validation_images: Annotated[int | None, option("validation_images")] = None,
    checkpoint_every: Annotated[int | None, option("checkpoint_every")] = None,
    checkpoint_minutes: Annotated[float | None, option("checkpoint_minutes")] = None,
    advance_images: Annotated[int | None, option("advance_images")] = None,
    workers: Workers = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default=f"{RUNS}/<curriculum>")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out, with the run's settings.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that --out already holds.")] = False,
    pause_after: Annotated[
        float | None,
        typer.Option(help="Save and stop after this many minutes; --resume goes on.", show_default="never"),
    ] = None,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard", help="Write the log for TensorBoard too, into the run's folder tensorboard."),
    ] = False,
) -> None:
    """Train a model through a curriculum on fresh images, and write its averaged weights.

    Training seeds are disjoint from the test sets'. Minutes and images are counted over all sessions of a run.
    """
    deadline = time.monotonic() + 60 * pause_after if pause_after is not None else float("inf")
    settings = {each.name for each in fields(Config)}
    chosen = {name: value for name, value in context.params.items() if name in settings and value is not None}
    with short_errors():
        refuse_many("experiments.pathx train")
        if tensorboard:
            board.writer_class()  # before anything is written
        if resume:
            if out is None:
                raise ValueError("--resume needs --out, the folder of the run")
            if curriculum_name is not None or minutes is not None or overwrite:
                raise ValueError("--resume keeps the run's settings: leave out --curriculum, --minutes and --overwrite")
            config = resumed(saved_run(out), chosen)
        else:
            stages = curriculum(curriculum_name or "pathx")
            stages = stages if minutes is None else stretched(stages, minutes)
            config = Config(curriculum=stages, **chosen)
        folder = out or RUNS / Path(curriculum_name or "pathx").stem
        said = train_under_a_bar(config, folder, workers, resume, overwrite, deadline, tensorboard)
    if said is None:
        console.print(f"Go on with: train --resume --out {folder}", soft_wrap=True)
        return
    cost = said["cost"]
    console.print(
        f"{said['parameters']:,} parameters, {cost['images']:,} images in {cost['minutes']:.1f} minutes, besides "
        f"{cost.get('startup_minutes', 0.0):.1f} of starting up; validation accuracy "
        f"{percent(said['validation']['accuracy'])}. Test it: evaluate {folder / 'model.safetensors'}",
        soft_wrap=True,
    )


def train_under_a_bar(
    config: Config,
    folder: Path,
    workers: int | None,
    resume: bool,
    overwrite: bool,
    deadline: float,
    tensorboard: bool,
) -> dict[str, Any] | None:
    """What is written beside the weights, or None where the deadline, by time.monotonic(), or SIGTERM came first."""
    shown: list[TrainingBar | board.Board] = []

    stages = config.curriculum
    begun: set[int] = set()

    def show(record: Record) -> None:
        if record["stage"] not in begun:
            begun.add(record["stage"])
            console.print(f"Stage {record['stage'] + 1} of {len(stages)}: {stages[record['stage']].name}")
        for each in shown:
            each.show(record)

    with ExitStack() as stack:
        told = stack.enter_context(told_to_end())
        stream = stack.enter_context(Stream(workers))
        run = Run(config, folder, stream, resume=resume, overwrite=overwrite, report=show)
        shown.append(stack.enter_context(TrainingBar(console, folder.name, run.progress)))
        if tensorboard:
            shown.append(stack.enter_context(board.Board(folder, run.state.step if resume else None)))
        said = run.train(pause=lambda step: told() or time.monotonic() > deadline)
    if said is None:
        console.print(
            f"Paused at step {run.state.step}, in stage {run.state.stage + 1} ({run.stage.name}), after "
            f"{run.state.images:,} images and {run.state.seconds / 60:.1f} minutes"
        )
    return said


@app.command()
def evaluate(
    file: Weights,
    size: Size = None,
    contour: Contour = None,
    images: Annotated[int, typer.Option(min=1, max=IMAGES, help="The first so many of the test set.")] = IMAGES,
    data: Data = DATA,
    sha256: Hash = None,
    device: Device = "auto",
    precision: Annotated[
        str | None, typer.Option(help="fp32 or bf16.", show_default="the run's; on a CPU fp32, as bf16 is slow there")
    ] = None,
    workers: Workers = None,
    keep: Annotated[
        bool, typer.Option("--store", help="Store the result beside the weights; of all images only.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file to write, too.", show_default="none")] = None,
) -> None:
    """Test a model on the first images of a test set, and compare with what is stored of it.

    Exits with 1 where the accuracy differs from the stored one by more than three standard errors.
    """
    with short_errors():
        model, config, about = weights.load(file, sha256)
        place = find_device(device)
        config = replace(config, precision=precision or ("fp32" if place.type == "cpu" else config.precision))
        stage = stage_for(config, size, contour)
        path = made_test_set(stage.size, stage.contour, data, workers)
        with Stream(workers) as stream:
            found = result(
                scores_on(model, config, stage, path, images, stream, place), stage, config, path, place
            ) | {"helped": helped_of(about)}  # fmt: skip
        if keep:
            store(file, stage, found)
        if out is not None:
            write_json(out, found)
        stored = weights.beside(file)["results"].get(key_of(stage)) if sha256 is None else None
        others = baselines(stage)
    console.print(
        f"{found['task']}, background {found['background']}: accuracy {percent(found['accuracy'])} ± "
        f"{100 * found['error']:.2f} on {found['images']:,} test images ({percent(found['connected'])} connected)"
        + (f"; trained with {helped}" if (helped := told(found["helped"])) else ""),
        soft_wrap=True,
    )
    if others:
        console.print(f"Baselines: {others}", soft_wrap=True)
    if stored is not None and not keep:
        same = agrees(found, stored)
        console.print(
            f"Stored: {percent(stored['accuracy'])} on {stored['images']:,}; "
            + ("the same within the error." if same else "[red]they differ.[/red]")
        )
        raise typer.Exit(0 if same else 1)


@app.command()
def testset(
    size: Annotated[int, typer.Option(help="Pixels along a side.")] = 128,
    contour: Annotated[int, typer.Option(help="Dashes of a path.")] = 14,
    every: Annotated[bool, typer.Option("--all", help="All twelve folds.")] = False,
    data: Data = DATA,
    record: Annotated[bool, typer.Option("--record", help="Write down the hash of a fold that has none.")] = False,
    workers: Workers = None,
) -> None:
    """Write the test set of a fold, 20,000 images, and check its hash."""
    with short_errors():
        for chosen in [(size, contour)] if not every else [(side, length) for side in LRA for length in FOLDS]:
            path = made_test_set(*chosen, data, workers, record)
            console.print(f"{sha256(path)}  {path}", soft_wrap=True)


def made_test_set(size: int, contour: int, folder: Path, workers: int | None, record: bool = False) -> Path:
    """The checked test set, made under a bar if it is missing."""
    with counting_bar(console, f"Test set of {size} pixels, {contour} dashes", IMAGES) as progress:
        return test_set(size, contour, folder, workers=workers or None, progress=progress, record=record)


@app.command()
def analyse(
    file: Weights,
    size: Size = None,
    contours: Annotated[str, typer.Option(help="Contour lengths to test with, commas between them.")] = "6,9,14",
    images: Annotated[int, typer.Option(min=20, max=IMAGES, help="The first so many of each test set.")] = 5000,
    examples: Annotated[int, typer.Option(min=0, help="Attention maps of images that are answered rightly.")] = 4,
    data: Data = DATA,
    sha256: Hash = None,
    device: Device = "auto",
    workers: Workers = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write.", show_default="<file's folder>/analysis")] = None,
) -> None:
    """Accuracy by contour length and marker distance beside rules that trace nothing; attention maps; masks' costs."""
    with short_errors():
        model, config, _ = weights.load(file, sha256)
        place = find_device(device)
        config = replace(config, precision="fp32" if place.type == "cpu" else config.precision)
        stages = [stage_for(config, size, int(contour)) for contour in contours.split(",")]
        folder = out or file.parent / "analysis"

        def file_of(stage: Stage) -> Path:
            return made_test_set(stage.size, stage.contour, data, workers)

        with Stream(workers) as stream:
            write_analysis(model, config, stages, file_of, images, examples, folder, stream, place)
    console.print((folder / "analysis.md").read_text(), markup=False, highlight=False, soft_wrap=True)


@app.command("table")
def table_command(
    folders: Annotated[list[Path] | None, typer.Argument(help="Where models with stored results lie.")] = None,
    out: Annotated[Path, typer.Option(help="Markdown file to write.")] = RESULTS / "table.md",
) -> None:
    """The table of results, beside published systems."""
    with short_errors():
        text = tables.markdown(tables.rows(folders or [RESULTS, RUNS]))
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(out, text)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@app.command()
def probe(
    sizes: Annotated[str, typer.Option(help="Pixels along a side, commas between them.")] = "128,256,64",
    contour: Annotated[int, typer.Option(help="Dashes of a path.")] = 14,
    masks: Annotated[
        str, typer.Option(help="Layers as --layers of train has them; several with ; between them.")
    ] = "tiles:16*6;near:16*6;tiles:16*4,dense*2;tiles:16*4,rows:2,columns:2;dense*6",
    background: Annotated[str, typer.Option(help="drop, or keep: all pixels are tokens.")] = "drop",
    tokens: Annotated[int, typer.Option(help="Of a step.")] = 128 * 1024,
    seconds: Annotated[float, typer.Option(help="Of timing a case.")] = 1.5,
    limit: Annotated[float, typer.Option(help="No case begins later than after so many seconds.")] = 60.0,
    block: Annotated[int | None, option("block")] = None,
    width: Annotated[int | None, option("width")] = None,
    heads: Annotated[int | None, option("heads")] = None,
    mlp: Annotated[int | None, option("mlp")] = None,
    precision: Annotated[str | None, option("precision")] = None,
    compiled: Annotated[bool | None, option("compiled", "--compiled/--no-compiled")] = None,
    recorded: Annotated[bool | None, option("recorded")] = None,
    profile: Annotated[int, typer.Option(help="Show what so many of the costliest kernels of a step take.", min=0)] = 0,
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="JSON file to write, too.", show_default="none")] = None,
) -> None:
    """Tokens and images a second of training steps, by size and masks; a case a line as soon as it is measured."""
    begun = time.perf_counter()
    chosen = {
        "block": block, "width": width, "heads": heads, "mlp": mlp, "precision": precision, "compiled": compiled,
        "recorded": recorded,
    }  # fmt: skip
    found: list[dict[str, Any]] = []
    with short_errors():
        config = Config(**{name: value for name, value in chosen.items() if value is not None})
        place = find_device(device)
        if place.type == "cpu" and device == "auto":
            raise ValueError(
                "there is no CUDA device, and a step of so many tokens takes minutes on a CPU; --device cpu "
                "--tokens 4096 runs the same on little"
            )
        pairs = [(int(size), layers) for size in sizes.split(",") for layers in masks.split(";")]
        cases = [probing.Case(size, contour, layers, background) for size, layers in pairs]
        for case in cases:
            if time.perf_counter() - begun > limit:
                console.print(f"[yellow]Out of time: {len(cases) - len(found)} cases are left out.[/yellow]")
                break
            console.print(f"{case.size} pixels, {case.layers} ...", highlight=False)
            found.append(probing.measured(case, config, tokens, place, seconds, profiled=profile > 0))
            shown = {name: _short(value) for name, value in found[-1].items() if name != "costs"}
            console.print(json.dumps(shown), soft_wrap=True)
            for cost in found[-1].get("costs", [])[:profile]:
                console.print(
                    f"{cost['ms']:9.3f} ms  {cost['calls']:6.1f} calls  {cost['name'][:100]}",
                    highlight=False,
                    markup=False,  # names have brackets
                    soft_wrap=True,
                )
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                write_json(out, found)
    show = Table(title=f"{tokens:,} tokens a step, {found[0]['device'] if found else ''}")
    for column in ("px", "layers", "step ms", "masks ms", "tokens/s", "images/s", "tiles", "GB"):
        show.add_column(column, justify="left" if column == "layers" else "right")
    for each in found:
        memory = "-" if each["memory_gb"] is None else f"{each['memory_gb']:.1f}"
        show.add_row(
            str(each["size"]), each["layers"], f"{each['step_ms']:.1f}", f"{each['masks_ms']:.1f}",
            f"{each['tokens_per_s']:,.0f}", f"{each['images_per_s']:,.0f}", percent(each["tiles"]), memory,
        )  # fmt: skip
    console.print(show)


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
