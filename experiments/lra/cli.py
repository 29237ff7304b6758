"""The command line: options only. session.py, evaluate.py, generator.py, demo.py and table/ implement the commands."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments.lra import arena, demo, evaluate
from experiments.lra.config import HELP, Config, configure, resumed
from experiments.lra.data.listops.generator import Settings
from experiments.lra.find_data import DATA, find_data, generated
from experiments.lra.model.masks import several
from experiments.lra.no_attention.network import Length
from experiments.lra.no_attention.results import measured
from experiments.lra.presets import PRESETS
from experiments.lra.report import print_evaluated, print_result, print_summary, print_table
from experiments.lra.session import Session
from experiments.lra.table import run as table
from experiments.lra.table.accuracy import collect
from experiments.lra.table.records import of_accuracies, run_of_runs
from experiments.lra.table.report import all_right, markdown, summary
from experiments.lra.table.run import Options as TableOptions
from experiments.lra.table.shapes import FIVE, VARIANTS
from experiments.lra.tasks import TASKS, load
from experiments.lra.train import check, saved_run
from experiments.lra.unused_settings import check_used
from experiments.lra.weights import store
from experiments.measurements import current_run
from experiments.measurements import write as write_record
from experiments.training import series, tensor_files, tensorboard
from experiments.training.atomic_files import write_json
from experiments.training.cli_errors import short_errors
from experiments.training.distributed import SINGLE, find_device, process_group, require_single_process
from experiments.training.environment import command_line
from experiments.training.options import (
    LOCAL,
    Device,
    Overwrite,
    PauseAfter,
    Resume,
    TensorBoard,
    command_group,
    deadline,
    folder_to_resume,
    settings_as_options,
)
from experiments.training.progress_bar import counting_bar
from experiments.training.session import pausing, print_resuming

RUNS = Path("runs/lra")
TABLE = Path("runs/lra-table")

app = command_group("Long Range Arena with block-sparse attention.")
console = Console()


def count_option(name: str) -> Any:
    return typer.Option(help=HELP[name].removeprefix("Generated data: ").capitalize())


@app.command()
@settings_as_options(Config)
def train(
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"Preset settings; other options change them: {', '.join(PRESETS)}. "
            "demo trains with four masks and compares them.",
            show_default="none",
        ),
    ] = None,
    *,
    chosen: dict[str, Any],
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Instead of --seed: train with each of these seeds (such as 0,1,2), each in its own folder in --out, "
            "and give mean and standard deviation of the test accuracy. --resume skips finished seeds.",
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
    resume: Resume = False,
    overwrite: Overwrite = False,
    pause_after: PauseAfter = None,
    tensorboard_files: TensorBoard = False,
) -> None:
    """Train a classifier, test it, and write its metrics. A preset changes the defaults below.

    On several GPUs of one machine: torchrun --nproc-per-node=2 -m experiments.lra train .... --batch stays the number
    of examples of a step, divided among the processes. With --context-parallel N, N processes share each sequence.
    """
    with short_errors():
        if tensorboard_files:
            tensorboard.writer_class()
        if resume:
            saved, saved_data = saved_run(folder_to_resume(out, preset=preset, overwrite=overwrite))
            config = resumed(saved, chosen)
            if data is None and (saved_data.is_dir() or saved_data.name != config.generator.folder_name):
                data = saved_data
        else:
            config = configure(preset, chosen)
            trained = demo.MASKS if preset == "demo" and "mask" not in chosen else (config.mask,)
            check_used(config, chosen, masks=trained, given_data=data is not None)
        if preset == "demo":
            require_single_process("the demo")
            if config.context_parallel > 1:
                raise ValueError("the demo runs in one process: leave out --context-parallel")
            if pause_after is not None or seeds is not None or tensorboard_files:
                raise ValueError("the demo has no --pause-after, --seeds or --tensorboard: it takes three minutes")
            if config.attention != "sparseflash":
                raise ValueError(f"the demo is of sparseflash; leave out --attention {config.attention}")
            for name in trained:
                check(replace(config, mask=name))
            exact = demo.run(config, find_data(config, data, console), out or RUNS / "demo", console, names=trained)
            raise typer.Exit(0 if exact else 1)
        chosen_seeds = series.parsed(seeds) if seeds is not None else series.saved(out) if resume and out else None
        if chosen_seeds is not None and "seed" in chosen:
            raise ValueError("--seeds stands instead of --seed: leave out one of them")
        check(config)
        folder = out or RUNS / default_name(config, series=chosen_seeds is not None)
        until = deadline(pause_after)
        with process_group(config.device, config.context_parallel) as ranks:
            console.quiet = not ranks.first
            found = ranks.first_before_others(lambda: find_data(config, data, console))
            with pausing(until) as pause:
                session = Session(found, overwrite, pause, ranks, tensorboard_files, console)
                if chosen_seeds is None:
                    result = session.train(config, folder, resume)
                    show = partial(print_result, path=folder / "metrics.json")
                else:
                    result = session.train_series(config, chosen_seeds, folder, resume)
                    show = partial(print_summary, path=folder / series.SUMMARY)
            if result is None:
                print_resuming(console, "experiments.lra", folder, ranks)
            else:
                show(console, result)


@app.command("arena")
@settings_as_options(Config, *(name for name in HELP if name not in arena.OF_ROWS))
def arena_command(
    rows: Annotated[str, typer.Option(help="Tasks, with commas between them.")] = "listops",
    masks: Annotated[
        str, typer.Option(help="Masks, with commas between them; 'local(n, window=256) | butterfly(n)' is a union.")
    ] = "dense,local,butterfly",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between them.")] = "0,1,2",
    preset: Annotated[
        str, typer.Option(help="rules: the arena's own inputs, no help but positions; or another preset of `train`.")
    ] = "rules",
    *,
    chosen: dict[str, Any],
    data: Annotated[
        list[str] | None,
        typer.Option(help="TASK=PATH of the task's files, once for each task but ListOps.", show_default="none"),
    ] = None,
    pretrain: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Minutes of self-pretraining before each run: hidden tokens of the task's training inputs.",
            show_default="none",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of all runs.")] = RUNS / "arena",
    pause_after: PauseAfter = None,
) -> None:
    """The arena's rows: train each task with each mask and seed, and print the table of all runs in --out.

    The same call goes on where the last one stopped. With --minutes all runs take equal time, with --steps equal steps.
    """
    with short_errors():
        require_single_process("arena")
        if not chosen.keys() & {"minutes", "steps"}:
            raise ValueError("the runs need an end that is equal for all: give --minutes or --steps")
        places = paths_of_tasks(data or [])
        tasks = rows.split(",")
        if unknown := [task for task in places if task not in tasks]:
            raise ValueError(f"--data {unknown[0]}=... must be of one of the rows {rows}")
        found = arena.rows_of(preset, tasks, several(masks), chosen, out, pretrain)
        for row in found:
            check(row.config)
        until = deadline(pause_after)
        by_task = {row.config.task: row.config for row in found}
        loaded = {task: find_data(config, places.get(task), console) for task, config in by_task.items()}
        with pausing(until) as pause:
            sessions = {task: Session(each, False, pause, SINGLE, False, console) for task, each in loaded.items()}
            complete = arena.train_all(found, series.parsed(seeds), sessions, until)
        console.print(markdown(arena.table(out)), markup=False, highlight=False, soft_wrap=True)
        console.print("All runs are complete." if complete else "Paused: the same command goes on.")


def paths_of_tasks(texts: list[str]) -> dict[str, Path]:
    found = dict(text.partition("=")[::2] for text in texts)
    for task, path in found.items():
        if task not in TASKS or not path:
            raise ValueError(f"--data must be TASK=PATH with one of the tasks {', '.join(TASKS)}; got {task}={path}")
    return {task: Path(path) for task, path in found.items()}


@app.command("no-attention")
def no_attention_command(
    record: Annotated[Path, typer.Option(help="File of measurements to write.")],
    rows: Annotated[str, typer.Option(help="Tasks, with commas between them.")] = "listops",
    rules: Annotated[
        str,
        typer.Option(
            help="bag: logistic regression on how often each token occurs; runs: the same of runs of up to 4 tokens; "
            "cnn: a small convolutional network."
        ),
    ] = "bag,runs",
    seeds: Annotated[str, typer.Option(help="Seeds of the networks, with commas between them.")] = "0,1,2",
    minutes: Annotated[float | None, typer.Option(help="Minutes to train a network.", show_default="no limit")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to train a network.", show_default="no limit")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="TASK=PATH of the task's files, once for each task but ListOps.", show_default="none"),
    ] = None,
    device: Device = "auto",
    commit: Annotated[str | None, typer.Option(help="The commit to note.", show_default="git's")] = None,
) -> None:
    """Fit models without attention to the arena's tasks, as baselines: what needs none of it."""
    with short_errors():
        place, places, found = find_device(device), paths_of_tasks(data or []), []
        run = current_run(place, command_line("experiments.lra", without=(*LOCAL, "--data")), commit=commit)
        for task in rows.split(","):
            loaded = find_data(configure(None, {"task": task}), places.get(task), console)
            for rule in rules.split(","):
                each = measured(loaded, rule, series.parsed(seeds), Length(steps, minutes), place)
                found.append(each)
                write_record(record, run, found)
                console.print(f"{each.name}: {each.value:.2f} % {each.settings}", soft_wrap=True, highlight=False)


@app.command("record")
def record_command(
    runs: Annotated[Path, typer.Argument(help="Folder of finished runs, such as those of arena.")],
    record: Annotated[Path, typer.Option(help="File of measurements to write.")],
    commit: Annotated[str, typer.Option(help="The runs' commit.")],
) -> None:
    """Write the accuracies of all finished runs below a folder: every seed, mean, deviation and helps."""
    with short_errors():
        require_single_process("record")
        write_record(record, run_of_runs(runs, commit), of_accuracies(collect(runs)))
    console.print(markdown(arena.table(runs)), markup=False, highlight=False, soft_wrap=True)


@app.command("test")
def test_command(
    weights: Annotated[Path, typer.Argument(help="Folder of a finished run, or its model.safetensors.")],
    data: Annotated[
        Path, typer.Option(help="Folder with the task's files, released or generated; the test split is used.")
    ],
    difficulty: Annotated[str | None, typer.Option(help=HELP["difficulty"], show_default="the run's")] = None,
    split: Annotated[str | None, typer.Option(help=HELP["split"], show_default="the run's")] = None,
    mask: Annotated[
        str | None,
        typer.Option(help="The run's mask if it is a function; the function runs only if it is named here."),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Examples at once.", show_default="the run's")] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="Test this many, the first ones.", show_default="all")
    ] = None,
    device: Device = "auto",
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write.", show_default="<run>/tests/<name of the data>.json")
    ] = None,
) -> None:
    """Test a finished run again: on more examples, on paths of other lengths, by subset.

    Generated Pathfinder images are grouped by the distance of their markers, ListOps by the root operator, beside the
    baselines. Another split of the training data is refused.
    """
    with short_errors():
        require_single_process("test")
        place = find_device(device)
        model, config, about = evaluate.opened(weights, place, mask)
        chosen = {"difficulty": difficulty, "split": split, "batch": batch}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        check_used(config, chosen, masks=(config.mask,), given_data=True)
        config = replace(config, **chosen)
        found_data = load(config.task, data, config.data)
        with counting_bar(console, "Testing", min(examples or len(found_data.test), len(found_data.test))) as progress:
            found = evaluate.evaluate(weights, model, config, about, found_data, first=examples, progress=progress)
        path = out or tensor_files.folder_of(weights) / "tests" / f"{found_data.folder.stem}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
    print_evaluated(console, found, path)


@app.command("store")
def store_command(
    weights: Annotated[Path, typer.Argument(help="Folder of a finished run, or its model.safetensors.")],
    out: Annotated[Path, typer.Option(help="Folder for the file.")],
) -> None:
    """Write a run's weights in half precision, to be kept beside its accuracy; `test` reads them."""
    with short_errors():
        require_single_process("store")
        path = store(weights, out)
    console.print(f"{path}: {path.stat().st_size:,} bytes", soft_wrap=True)


@app.command("generate")
def generate_command(
    out: Annotated[Path, typer.Option(help="The data's folder is made inside this folder.")] = DATA,
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

    Lengths are in tokens, without parentheses.
    """
    with short_errors():
        require_single_process("generate")
        folder = generated(Settings(longer_than, shorter_than, train, val, test, seed), out, console, workers)
    console.print(f"Generated data (not the released files): {folder}", soft_wrap=True)


@app.command("table")
def table_command(
    tasks: Annotated[str, typer.Option(help="Tasks to measure, with commas between them.")] = ",".join(FIVE),
    variants: Annotated[
        str, typer.Option(help="Variants to measure; standard is the reference of the others.")
    ] = ",".join(VARIANTS),
    preset: Annotated[str, typer.Option(help="The models: lra, the arena's own, nystromformer, or modern.")] = "lra",
    batch: Annotated[
        int | None,
        typer.Option(
            help="Examples a step. If standard attention does not fit, everything is measured again with half of them.",
            show_default="the preset's",
        ),
    ] = None,
    block: Annotated[int | None, typer.Option(help="Block size of the masks.", show_default="the preset's")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds in which the variants take turns.")] = TableOptions.rounds,
    steps: Annotated[int, typer.Option(help="Timed training steps of each variant in a round.")] = (TableOptions.steps),
    minutes: Annotated[float, typer.Option(help="No task starts after this time.")] = TableOptions.minutes,
    compiled: Annotated[
        bool, typer.Option("--compiled/--no-compiled", help=f"Of all variants: {HELP['compiled']}")
    ] = TableOptions.compiled,
    recorded: Annotated[
        bool,
        typer.Option(
            "--recorded/--no-recorded", help="Time the steps of all variants as CUDA graphs, or launched by the host."
        ),
    ] = TableOptions.recorded,
    keep_times: Annotated[
        bool, typer.Option("--keep-times", help="Measure nothing: keep the times in --out, and collect accuracies.")
    ] = False,
    runs: Annotated[
        Path | None,
        typer.Option(help="Accuracies are those of all finished runs below this folder.", show_default=str(RUNS)),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for table.md, table.png and the numbers.")] = TABLE,
    device: Annotated[
        str, typer.Option(help="cuda, cuda:1, ...; or cpu: everything tiny, to test the command.")
    ] = "cuda",
    commit: Annotated[str | None, typer.Option(help="The commit to note.", show_default="git's")] = None,
) -> None:
    """The paper's table: accuracies of finished runs, and training speed beside standard attention.

    Times the training step of one model at the shape of each of the five tasks, with standard attention, PyTorch's
    attention and sparseflash, in turns. Variants that differ from fp64 are not timed.
    """
    with short_errors():
        require_single_process("table")
        if runs is not None and not runs.is_dir():
            raise FileNotFoundError(f"there is no folder {runs}")
        options = None
        if not keep_times:
            place = find_device(device)
            chosen = tuple(tasks.split(",")), tuple(variants.split(","))
            options = TableOptions(place, *chosen, preset, batch, block, rounds, steps, minutes, compiled, recorded)
        say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        command = command_line("experiments.lra", without=("--out", "--runs"))
        results = table.run(options, runs or RUNS, out, command, commit, say)
        print_table(console, summary(results))
        console.print(f"The table, the times and the accuracies: {out / 'table.md'}", soft_wrap=True)
        raise typer.Exit(0 if all_right(results.times) else 1)


def default_name(config: Config, *, series: bool = False) -> str:
    mask = "".join(letter if letter.isalnum() else "-" for letter in config.mask).strip("-")
    other = "" if config.attention == "sparseflash" else f"{config.attention}-"
    other += "" if config.objective == "classify" else f"{config.objective}-"
    other += "" if config.initial is None else "pretrained-"
    return f"{config.task}-{mask}-{other}" + ("seeds" if series else f"seed{config.seed}")
