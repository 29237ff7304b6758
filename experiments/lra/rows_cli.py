from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments.lra import arena
from experiments.lra.config import HELP, Config, configure
from experiments.lra.find_data import find_data
from experiments.lra.model.masks import several
from experiments.lra.no_attention.measure import measured
from experiments.lra.no_attention.network import configured
from experiments.lra.session import Session
from experiments.lra.table.accuracy import collect
from experiments.lra.table.records import of_accuracies, run_of_runs
from experiments.lra.table.report import markdown
from experiments.lra.table.rows import rendered
from experiments.lra.tasks import TASKS
from experiments.lra.train import check
from experiments.measurements import current_run
from experiments.measurements import write as write_record
from experiments.training import series
from experiments.training.cli_errors import short_errors
from experiments.training.distributed import SINGLE, find_device, require_single_process
from experiments.training.environment import command_line
from experiments.training.options import LOCAL, Device, PauseAfter, deadline, settings_as_options
from experiments.training.session import pausing

console = Console()


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
    out: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs/lra/arena"),
    pause_after: PauseAfter = None,
) -> None:
    """The arena's rows: train each task with each mask and seed, and print the table of all runs in --out.

    With --minutes all runs take equal time, with --steps equal steps.
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
            sessions = {task: Session(each, False, pause, SINGLE, console) for task, each in loaded.items()}
            complete = arena.train_all(found, series.parsed(seeds), sessions, until)
        console.print(markdown(arena.table(collect(out))), markup=False, highlight=False, soft_wrap=True)
        console.print("All runs are complete." if complete else "Paused: the same command goes on.")


def paths_of_tasks(texts: list[str]) -> dict[str, Path]:
    found = dict(text.partition("=")[::2] for text in texts)
    for task, path in found.items():
        if task not in TASKS or not path:
            raise ValueError(f"--data must be TASK=PATH with one of the tasks {', '.join(TASKS)}; got {task}={path}")
    return {task: Path(path) for task, path in found.items()}


@settings_as_options(
    Config, "minutes", "steps", "batch", "lr", "warmup", "weight_decay", "width", "depth", "dropout", "augment",
    "cutmix", "label_smoothing", "average", "precision", "recorded",
)  # fmt: skip
def no_attention_command(
    record: Annotated[Path, typer.Option(help="File of measurements to write.")],
    rows: Annotated[str, typer.Option(help="Tasks, with commas between them.")] = "listops",
    rules: Annotated[
        str,
        typer.Option(
            help="bag: logistic regression on how often each token occurs; runs: the same of runs of up to 4 tokens; "
            "cnn: a small convolutional network, 2-D of images and 1-D of sequences."
        ),
    ] = "bag,runs",
    seeds: Annotated[str, typer.Option(help="Seeds of the networks, with commas between them.")] = "0,1,2",
    preset: Annotated[
        str,
        typer.Option(help="Networks are trained as this preset's transformers: rules, best, or others of `train`."),
    ] = "rules",
    *,
    chosen: dict[str, Any],
    data: Annotated[
        list[str] | None,
        typer.Option(help="TASK=PATH of the task's files, once for each task but ListOps.", show_default="none"),
    ] = None,
    device: Device = "auto",
    commit: Annotated[str | None, typer.Option(help="The commit to note.", show_default="git's")] = None,
) -> None:
    """Fit models without attention to the arena's tasks, as baselines.

    The options of training are for networks.
    """
    with short_errors():
        place, places, found = find_device(device), paths_of_tasks(data or []), {}
        trains = "cnn" in rules.split(",")
        if chosen and not trains:
            raise ValueError(f"--{next(iter(chosen)).replace('_', '-')} is for --rules cnn; got {rules}")
        if trains and not chosen.keys() & {"minutes", "steps"}:
            raise ValueError("a network needs an end: give --minutes or --steps")
        run = current_run(place, command_line("experiments.lra", without=(*LOCAL, "--data")), commit=commit)
        for task in rows.split(","):
            of_task = {**chosen, "device": device, "task": task}
            config = configured(preset, of_task) if trains else configure(None, of_task)
            loaded = find_data(config, places.get(task), console)
            for rule in rules.split(","):
                for each in measured(loaded, rule, config, series.parsed(seeds), console):
                    found[each.name] = each
                    write_record(record, run, found.values())
                    console.print(f"{each.name}: {each.value:.2f} % {each.settings}", soft_wrap=True, highlight=False)


def record_command(
    runs: Annotated[Path, typer.Argument(help="Folder of finished runs.")] = Path("runs/lra"),
    record: Annotated[
        Path | None, typer.Option(help="File of measurements to write; table.md beside it is rewritten.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="The runs' commit, needed with --record.")] = None,
) -> None:
    """The accuracies of all finished runs below a folder: every seed, mean, deviation and extra help."""
    with short_errors():
        require_single_process("record")
        if (record is None) != (commit is None):
            raise ValueError("--record must be given together with --commit, the commit of the runs")
        found = collect(runs)
        if not found:
            raise FileNotFoundError(f"there is no finished run below {runs}")
        if record is not None and commit is not None:
            write_record(record, run_of_runs(runs, commit), of_accuracies(found))
            (record.parent / "table.md").write_text(rendered(record.parent))
    console.print(markdown(arena.table(found)), markup=False, highlight=False, soft_wrap=True)
