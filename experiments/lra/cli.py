"""The command line: options only."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments.lra import demo, evaluate, rows_cli
from experiments.lra.config import HELP, Config, configure, resumed
from experiments.lra.data.listops.generator import Settings
from experiments.lra.find_data import DATA, find_data, generated
from experiments.lra.presets import PRESETS
from experiments.lra.report import print_evaluated, print_result, print_summary, print_table
from experiments.lra.session import Session
from experiments.lra.shipped import shipped
from experiments.lra.table import run as table
from experiments.lra.table.report import all_right, summary
from experiments.lra.table.run import Options as TableOptions
from experiments.lra.table.shapes import FIVE, VARIANTS
from experiments.lra.train import check, saved_run
from experiments.lra.unused_settings import check_used
from experiments.lra.weights import store
from experiments.measurements import add_seed, current_run
from experiments.training import series, tensor_files
from experiments.training.atomic_files import write_json
from experiments.training.cli_errors import short_errors
from experiments.training.distributed import find_device, process_group, require_single_process
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
) -> None:
    """Train a classifier, test it, and write its metrics. A preset changes the defaults below.

    On several GPUs of one machine: torchrun --nproc-per-node=2 -m experiments.lra train .... --batch stays the number
    of examples of a step, divided among the processes. With --context-parallel N, N processes share each sequence.
    """
    with short_errors():
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
            if pause_after is not None or seeds is not None:
                raise ValueError("the demo has no --pause-after or --seeds: it takes three minutes")
            if config.attention != "sparseflash":
                raise ValueError(f"the demo is of sparseflash; leave out --attention {config.attention}")
            for name in trained:
                check(replace(config, mask=name))
            exact = demo.run(config, find_data(config, data, console), out or RUNS / "demo", console, names=trained)
            raise typer.Exit(0 if exact else 1)
        chosen_seeds = series.parsed(seeds) if seeds is not None else series.saved(out) if resume and out else None
        if chosen_seeds is not None and "seed" in chosen:
            raise ValueError("--seeds stands instead of --seed: leave out one of them")
        check(config)  # before generating data, which takes minutes
        folder = out or RUNS / default_name(config, series=chosen_seeds is not None)
        until = deadline(pause_after)
        with process_group(config.device, config.context_parallel) as ranks:
            console.quiet = not ranks.first
            found = ranks.first_before_others(lambda: find_data(config, data, console))
            with pausing(until) as pause:
                session = Session(found, overwrite, pause, ranks, console)
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


app.command("arena")(rows_cli.arena_command)
app.command("no-attention")(rows_cli.no_attention_command)
app.command("record")(rows_cli.record_command)


@app.command("test")
def test_command(
    weights: Annotated[Path, typer.Argument(help="Folder of a finished run, or its model.safetensors.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the task's files, released or generated; the test split is used.",
            show_default=f"for ListOps: generated as needed, below {DATA}",
        ),
    ] = None,
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
    record: Record = None,
) -> None:
    """Test a finished run again: on more examples, on paths of other lengths, by subset.

    By the distance of the markers in generated Pathfinder, by root operator in ListOps, beside the baselines. Another
    split of the training data is refused.
    """
    with short_errors():
        require_single_process("test")
        place = find_device(device)
        model, config, about = evaluate.opened(weights, place, mask)
        chosen = {"difficulty": difficulty, "split": split, "batch": batch}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        check_used(config, chosen, masks=(config.mask,), given_data=True)
        config = replace(config, **chosen)
        found_data = find_data(config, data, console)
        with counting_bar(console, "Testing", min(examples or len(found_data.test), len(found_data.test))) as progress:
            found = evaluate.evaluate(weights, model, config, about, found_data, first=examples, progress=progress)
        path = out or tensor_files.folder_of(weights) / "tests" / f"{found_data.folder.stem}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
        if record is not None:
            command = command_line("experiments.lra", without=(*LOCAL, "--data"))
            add_seed(record, current_run(place, command, seed=config.seed), [evaluate.measurement(found)])
    print_evaluated(console, found, path)


@app.command("store")
def store_command(
    weights: Annotated[Path, typer.Argument(help="Folder of a finished run, or its model.safetensors.")],
    out: Annotated[Path, typer.Option(help="Folder for the file.")],
    bits: Annotated[int, typer.Option(help="16: half precision; 8: matrices in whole numbers, a scale a row.")] = 16,
    figure: Annotated[
        str | None,
        typer.Option(help="Name of the run's stored accuracy, to be written into the file.", show_default="none"),
    ] = None,
) -> None:
    """Write a run's weights in half precision or in 8 bits, to be kept beside its accuracy; `test` reads them."""
    with short_errors():
        require_single_process("store")
        path = store(weights, out, bits, figure)
    console.print(f"{path}: {path.stat().st_size:,} bytes", soft_wrap=True)


@app.command("models")
def models_command() -> None:
    """List the models in experiments/weights: the accuracy of each run, and the command that tests its weights."""
    with short_errors():
        for each in shipped():
            console.print(f"{each.task}, {each.bytes:,} bytes, {each.accuracy:.2f} %: {each.figure}", soft_wrap=True)
            console.print(f"    {each.command}", markup=False, highlight=False, soft_wrap=True)
        console.print("Models for Path-X and Path-256 are beside them:")
        console.print("    python -m experiments.pathx evaluate experiments/weights/path-x", soft_wrap=True)


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
    out: Annotated[Path, typer.Option(help="Folder for table.md, table.png and the numbers.")] = TABLE,
    device: Annotated[
        str, typer.Option(help="cuda, cuda:1, ...; or cpu: everything tiny, to test the command.")
    ] = "cuda",
    commit: Annotated[str | None, typer.Option(help="The commit to note.", show_default="git's")] = None,
) -> None:
    """The FlashAttention paper's table: training speed beside standard attention at the shapes of five tasks.

    Variants that differ from fp64 are not timed.
    """
    with short_errors():
        require_single_process("table")
        place = find_device(device)
        chosen = tuple(tasks.split(",")), tuple(variants.split(","))
        options = TableOptions(place, *chosen, preset, batch, block, rounds, steps, minutes, compiled, recorded)
        say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        results = table.run(options, out, command_line("experiments.lra", without=("--out",)), commit, say)
        print_table(console, summary(results))
        console.print(f"The table and the times: {out / 'table.md'}", soft_wrap=True)
        raise typer.Exit(0 if all_right(results.times) else 1)


def default_name(config: Config, *, series: bool = False) -> str:
    mask = "".join(letter if letter.isalnum() else "-" for letter in config.mask).strip("-")
    other = "" if config.attention == "sparseflash" else f"{config.attention}-"
    other += "" if config.objective == "classify" else f"{config.objective}-"
    other += "" if config.initial is None else "pretrained-"
    return f"{config.task}-{mask}-{other}" + ("seeds" if series else f"seed{config.seed}")
