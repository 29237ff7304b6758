"""The command line: options only. What they do is in train.py, generate.py and demo.py."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments.lra import board, demo, judge
from experiments.lra import seeds as several
from experiments.lra.config import HELP, SHOWN_DEFAULTS, Config, configure, resumed
from experiments.lra.effects import check_effects
from experiments.lra.errors import short_errors
from experiments.lra.files import write_json
from experiments.lra.generate import LABEL, Settings, available_cores, generate
from experiments.lra.presets import PRESETS
from experiments.lra.progress import TrainingBar, counting_bar
from experiments.lra.ranks import Ranks, find_device, joined, refuse_many
from experiments.lra.report import print_judged, print_result, print_summary, print_table
from experiments.lra.runlog import Record
from experiments.lra.table import run as table
from experiments.lra.table.report import all_right, summary
from experiments.lra.table.run import Options as TableOptions
from experiments.lra.table.shapes import FIVE, VARIANTS
from experiments.lra.tasks import Data, load
from experiments.lra.termination import told_to_end
from experiments.lra.train import Run, check, check_initial, saved_run

DATA = Path("data/lra")
RUNS = Path("runs/lra")
RESULTS = Path("experiments/results/lra")

app = typer.Typer(
    help="Long Range Arena with block-sparse attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()


def option(name: str) -> Any:
    """An option that sets a field of Config; None where the user leaves it out, so that a preset counts."""
    return typer.Option(help=HELP[name], show_default=SHOWN_DEFAULTS[name])


def count_option(name: str) -> Any:
    """An option of `generate`, described as the field of Config that asks `train` for the same data."""
    return typer.Option(help=HELP[name].removeprefix("Generated data: ").capitalize())


@app.command()
def train(
    context: typer.Context,
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"Settings to start from, which other options change: {', '.join(PRESETS)}. "
            "demo trains with four masks and compares them.",
            show_default="none",
        ),
    ] = None,
    task: Annotated[str | None, option("task")] = None,
    mask: Annotated[str | None, option("mask")] = None,
    attention: Annotated[str | None, option("attention")] = None,
    block: Annotated[int | None, option("block")] = None,
    window: Annotated[int | None, option("window")] = None,
    depth: Annotated[int | None, option("depth")] = None,
    width: Annotated[int | None, option("width")] = None,
    heads: Annotated[int | None, option("heads")] = None,
    head_dim: Annotated[int | None, option("head_dim")] = None,
    mlp: Annotated[int | None, option("mlp")] = None,
    dropout: Annotated[float | None, option("dropout")] = None,
    attention_dropout: Annotated[float | None, option("attention_dropout")] = None,
    pool: Annotated[str | None, option("pool")] = None,
    positions: Annotated[str | None, option("positions")] = None,
    qk_norm: Annotated[bool | None, option("qk_norm")] = None,
    augment: Annotated[str | None, option("augment")] = None,
    background: Annotated[str | None, option("background")] = None,
    objective: Annotated[str | None, option("objective")] = None,
    hidden: Annotated[float | None, option("hidden")] = None,
    auxiliary: Annotated[float | None, option("auxiliary")] = None,
    initial: Annotated[str | None, option("initial")] = None,
    steps: Annotated[int | None, option("steps")] = None,
    minutes: Annotated[float | None, option("minutes")] = None,
    batch: Annotated[int | None, option("batch")] = None,
    buckets: Annotated[bool | None, option("buckets")] = None,
    max_tokens: Annotated[int | None, option("max_tokens")] = None,
    lr: Annotated[float | None, option("lr")] = None,
    warmup: Annotated[int | None, option("warmup")] = None,
    schedule: Annotated[str | None, option("schedule")] = None,
    weight_decay: Annotated[float | None, option("weight_decay")] = None,
    clip: Annotated[float | None, option("clip")] = None,
    average: Annotated[float | None, option("average")] = None,
    keep: Annotated[str | None, option("keep")] = None,
    seed: Annotated[int | None, option("seed")] = None,
    device: Annotated[str | None, option("device")] = None,
    precision: Annotated[str | None, option("precision")] = None,
    compiled: Annotated[bool | None, option("compiled")] = None,
    recorded: Annotated[bool | None, option("recorded")] = None,
    eval_every: Annotated[int | None, option("eval_every")] = None,
    eval_examples: Annotated[int | None, option("eval_examples")] = None,
    checkpoint_every: Annotated[int | None, option("checkpoint_every")] = None,
    log_every: Annotated[int | None, option("log_every")] = None,
    difficulty: Annotated[str | None, option("difficulty")] = None,
    split: Annotated[str | None, option("split")] = None,
    longer_than: Annotated[int | None, option("longer_than")] = None,
    shorter_than: Annotated[int | None, option("shorter_than")] = None,
    train_examples: Annotated[int | None, option("train_examples")] = None,
    val_examples: Annotated[int | None, option("val_examples")] = None,
    test_examples: Annotated[int | None, option("test_examples")] = None,
    data_seed: Annotated[int | None, option("data_seed")] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Instead of --seed: train with each of these, 0,1,2 say, one after the other, each in a folder of its "
            "own in --out, and give mean and standard deviation of the test accuracy.",
            show_default="one run",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the task's files, released or generated.",
            show_default=f"for ListOps: generated as needed, below {DATA}",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the run or runs.", show_default=f"{RUNS}/<task>-<mask>-seed<seed>, or -seeds"),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest checkpoint in --out, with the run's settings; of several seeds, with those "
            "that are not done.",
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that --out already holds.")] = False,
    pause_after: Annotated[
        float | None,
        typer.Option(
            help="Save and stop after this many minutes of this session; --resume goes on.",
            show_default="never",
        ),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write the log for TensorBoard too, into a run's folder tensorboard.")
    ] = False,
) -> None:
    """Train a classifier, test it, and write its metrics. A preset changes the defaults below.

    On several GPUs of one machine: torchrun --nproc-per-node=2 -m experiments.lra train ..., where --batch stays the
    number of examples of a step, which the processes share.
    """
    settings = {field.name for field in fields(Config)}
    chosen = {name: value for name, value in context.params.items() if name in settings and value is not None}
    with short_errors():
        if tensorboard:
            board.writer_class()  # before anything is written
        if resume:
            if preset or overwrite:
                raise ValueError("--resume keeps the run's settings: leave out --preset and --overwrite")
            if out is None:
                raise ValueError("--resume needs --out, the folder of the run")
            saved, saved_data = saved_run(out)
            config = resumed(saved, chosen)
            # Generated data is what its folder's name says: where that is gone, it is generated again.
            if data is None and (saved_data.is_dir() or saved_data.name != config.generator.folder_name):
                data = saved_data
        else:
            config = configure(preset, chosen)
            trained = demo.MASKS if preset == "demo" and "mask" not in chosen else (config.mask,)
            check_effects(config, chosen, masks=trained, given_data=data is not None)
        if preset == "demo":
            refuse_many("the demo")
            if pause_after is not None or seeds is not None or tensorboard:
                raise ValueError("the demo has no --pause-after, --seeds or --tensorboard: it takes three minutes")
            if config.attention != "sparseflash":
                raise ValueError(f"the demo is of sparseflash; leave out --attention {config.attention}")
            for name in trained:
                check(replace(config, mask=name))
            exact = demo.run(config, find_data(config, data), out or RUNS / "demo", console, names=trained)
            raise typer.Exit(0 if exact else 1)
        chosen_seeds = several.parsed(seeds) if seeds is not None else several.saved(out) if resume and out else None
        if chosen_seeds is not None and "seed" in chosen:
            raise ValueError("--seeds stands instead of --seed: leave out one of them")
        check(config)  # before data are generated, which takes minutes
        folder = out or RUNS / default_name(config, series=chosen_seeds is not None)
        deadline = time.monotonic() + 60 * pause_after if pause_after is not None else math.inf
        with joined(config.device) as ranks:
            console.quiet = not ranks.first
            found = ranks.after_first(lambda: find_data(config, data))
            with told_to_end() as told:
                session = Session(
                    found, overwrite, lambda step: told() or time.monotonic() > deadline, ranks, tensorboard
                )
                if chosen_seeds is None:
                    result = session.train(config, folder, resume)
                    show = partial(print_result, path=folder / "metrics.json")
                else:
                    result = session.train_series(config, chosen_seeds, folder, resume)
                    show = partial(print_summary, path=folder / several.SUMMARY)
            if result is None:
                console.print(f"Go on with: train --resume --out {folder}", soft_wrap=True)
            else:
                show(console, result)


@dataclass(frozen=True)
class Session:
    """What the runs that one command starts have in common."""

    data: Data
    overwrite: bool
    pause: Callable[[int], bool]  # asked after every step: where it says yes, the run is saved and stops
    ranks: Ranks
    tensorboard: bool

    def train_series(self, config: Config, seeds: tuple[int, ...], folder: Path, resume: bool) -> dict[str, Any] | None:
        """Train once with each seed; the summary, or None where it was paused."""
        place = self.data.folder
        if not resume:
            check_initial(config, self.data)
        self.ranks.from_first(
            lambda: several.begin(folder, config, seeds, place, resume=resume, overwrite=self.overwrite)
        )
        return several.run(config, seeds, self.data, folder, self.train, resume=resume, ranks=self.ranks)

    def train(self, config: Config, folder: Path, resume: bool) -> dict[str, Any] | None:
        """Train under a bar; the metrics, or None where it was paused."""
        shown: list[TrainingBar | board.Board] = []

        def show(record: Record) -> None:
            for each in shown:
                each.show(record)

        run = Run(config, self.data, folder, resume=resume, overwrite=self.overwrite, report=show, ranks=self.ranks)
        console.print(f"{run.folder}: {run.mask!r}", soft_wrap=True)
        with ExitStack() as stack:
            shown.append(stack.enter_context(TrainingBar(console, f"{config.mask} seed {config.seed}", run.progress)))
            if self.tensorboard and self.ranks.first:
                shown.append(stack.enter_context(board.Board(folder, run.step if resume else None)))
            metrics = run.train(self.pause)
        if metrics is None:
            console.print(f"Paused at step {run.step}")
        return metrics


@app.command("test")
def test_command(
    weights: Annotated[Path, typer.Argument(help="Folder of a finished run, or its model.safetensors.")],
    data: Annotated[
        Path, typer.Option(help="Folder with the task's files, released or generated; their test split is asked for.")
    ],
    difficulty: Annotated[str | None, typer.Option(help=HELP["difficulty"], show_default="the run's")] = None,
    split: Annotated[str | None, typer.Option(help=HELP["split"], show_default="the run's")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Examples at once.", show_default="the run's")] = None,
    device: Annotated[str, option("device")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write.", show_default="<run>/tests/<name of the data>.json")
    ] = None,
) -> None:
    """Test a finished run again: on more examples, on paths of other lengths, by what the answers depend on.

    Generated Pathfinder images are told by the distance of their markers, ListOps by the root operator, beside rules
    that know no more. Another split of the examples that the run was trained on is refused.
    """
    with short_errors():
        refuse_many("test")
        place = find_device(device)
        model, config, about = judge.opened(weights, place)
        chosen = {"difficulty": difficulty, "split": split, "batch": batch}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        check_effects(config, chosen, masks=(config.mask,), given_data=True)
        config = replace(config, **chosen)
        found_data = load(config.task, data, config.data)
        with counting_bar(console, "Testing", len(found_data.test)) as progress:
            found = judge.judge(weights, model, config, about, found_data, progress=progress)
        folder = weights if weights.is_dir() else weights.parent
        path = out or folder / "tests" / f"{found_data.folder.stem}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
    print_judged(console, found, path)


@app.command("generate")
def generate_command(
    out: Annotated[Path, typer.Option(help="The data's own folder is made in this one.")] = DATA,
    longer_than: Annotated[int, count_option("longer_than")] = Settings.longer_than,
    shorter_than: Annotated[int, count_option("shorter_than")] = Settings.shorter_than,
    train: Annotated[int, count_option("train_examples")] = Settings.train,
    val: Annotated[int, count_option("val_examples")] = Settings.val,
    test: Annotated[int, count_option("test_examples")] = Settings.test,
    seed: Annotated[int, count_option("data_seed")] = Settings.seed,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; the files do not depend on it.", show_default="all cores"),
    ] = None,
) -> None:
    """Write ListOps data by the published generator, in the published format.

    Lengths are in tokens, parentheses not counted.
    """
    with short_errors():
        refuse_many("generate")
        folder = generated(Settings(longer_than, shorter_than, train, val, test, seed), out, workers)
    console.print(f"Generated data (not the released files): {folder}", soft_wrap=True)


@app.command("table")
def table_command(
    tasks: Annotated[str, typer.Option(help="Tasks to measure, with commas between them.")] = ",".join(FIVE),
    variants: Annotated[
        str, typer.Option(help="What to measure; standard is what the others are compared with.")
    ] = ",".join(VARIANTS),
    preset: Annotated[str, typer.Option(help="The models: lra, the arena's own, nystromformer, or modern.")] = "lra",
    batch: Annotated[
        int | None,
        typer.Option(
            help="Examples a step. Where standard attention does not fit, all is measured again with half of them.",
            show_default="the preset's",
        ),
    ] = None,
    block: Annotated[
        int | None, typer.Option(help="Tokens along one side of the masks' tiles.", show_default="the preset's")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds in which the variants take turns.")] = TableOptions.rounds,
    steps: Annotated[int, typer.Option(help="Training steps that a variant is timed for in a round.")] = (
        TableOptions.steps
    ),
    minutes: Annotated[float, typer.Option(help="No task begins later than this.")] = TableOptions.minutes,
    compiled: Annotated[
        bool, typer.Option("--compiled/--no-compiled", help=f"Of all variants: {HELP['compiled']}")
    ] = TableOptions.compiled,
    recorded: Annotated[
        bool,
        typer.Option(
            "--recorded/--no-recorded", help="Time steps as CUDA graphs, of all variants, or as the host starts them."
        ),
    ] = TableOptions.recorded,
    keep_times: Annotated[
        bool, typer.Option("--keep-times", help="Measure nothing: keep the times in --out, and collect accuracies.")
    ] = False,
    runs: Annotated[Path, typer.Option(help="Accuracies are those of all finished runs below this folder.")] = RUNS,
    out: Annotated[Path, typer.Option(help="Where table.md, table.png and the numbers go.")] = RESULTS,
    device: Annotated[
        str, typer.Option(help="cuda, cuda:1, ...; or cpu: everything tiny, a test of the command and no measurement.")
    ] = "cuda",
    commit: Annotated[
        str | None, typer.Option(help="What to call the code measured, where git cannot tell.", show_default="git's")
    ] = None,
) -> None:
    """The paper's table: accuracy of the runs there are, and the speed of training beside standard attention.

    Measures the training step of the same model, at the shape of each of the five tasks, with standard attention,
    PyTorch's own and ours, in turns. Every variant is compared with fp64 first; what is wrong is not timed.
    """
    with short_errors():
        refuse_many("table")
        options = None
        if not keep_times:
            place = find_device(device)
            chosen = tuple(tasks.split(",")), tuple(variants.split(","))
            options = TableOptions(place, *chosen, preset, batch, block, rounds, steps, minutes, compiled, recorded)
            if place.type == "cpu" and out == RESULTS:
                raise ValueError(
                    f"a test on the CPU must not replace what is in {RESULTS}: name another folder by --out"
                )
        say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        results = table.run(options, runs, out, repeatable(sys.argv[1:]), commit, say)
        print_table(console, summary(results))
        console.print(f"The table, the times and the accuracies: {out / 'table.md'}", soft_wrap=True)
        raise typer.Exit(0 if all_right(results.times) else 1)


def repeatable(words: list[str]) -> str:
    """The command, without where its files lie."""
    kept: list[str] = []
    for before, word in zip(["", *words], words):
        if not {before, word} & {"--out", "--runs"} and not word.startswith(("--out=", "--runs=")):
            kept.append(word)
    return shlex.join(["python", "-m", "experiments.lra", *kept])


def generated(settings: Settings, parent: Path, workers: int | None = None) -> Path:
    """The folder of some generated data, written under a progress bar if it is missing."""
    if (parent / settings.folder_name / LABEL).exists():
        return parent / settings.folder_name
    name = f"Generating ListOps on {workers or available_cores()} cores"
    with counting_bar(console, name, sum(settings.sizes)) as progress:
        return generate(settings, parent, workers=workers, progress=progress)


def find_data(config: Config, folder: Path | None) -> Data:
    """The data in the folder that the user named, or else generated data, made if it is missing.

    A named folder is never filled: whoever asks for the released files must not get others.
    """
    if folder is None and config.task != "listops":
        made = " (or a file that `python -m experiments.pathfinder generate` writes)" if "path" in config.task else ""
        raise ValueError(f"the task {config.task} needs --data, the folder with its files{made}")
    return load(config.task, generated(config.generator, DATA) if folder is None else folder, config.data)


def default_name(config: Config, *, series: bool = False) -> str:
    """The folder name of a run: its task, mask and seed; or of the runs with several seeds."""
    mask = "".join(letter if letter.isalnum() else "-" for letter in config.mask).strip("-")
    other = "" if config.attention == "sparseflash" else f"{config.attention}-"
    other += "" if config.objective == "classify" else f"{config.objective}-"
    other += "" if config.initial is None else "pretrained-"
    return f"{config.task}-{mask}-{other}" + ("seeds" if series else f"seed{config.seed}")
