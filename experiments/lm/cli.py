from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments.lm import (
    bench,
    bench_plot,
    bench_report,
    compare,
    compare_report,
    generate,
    records,
    session,
    show,
    tested,
)
from experiments.lm.cases import DEFAULT, parsed
from experiments.lm.config import DEFAULTS, HELP, Config, configure, resumed
from experiments.lm.data.books import novels
from experiments.lm.data.files import VALIDATION_SHARE, find
from experiments.lm.data.store import Store, check_replaceable, make, make_parts, opened_or_unpacked
from experiments.lm.data.store import pack as pack_store
from experiments.lm.presets import PRESETS
from experiments.lm.sample import continued, opened
from experiments.lm.train import saved_run
from experiments.measurements import current_run, run_of
from experiments.training import series
from experiments.training.cli_errors import short_errors
from experiments.training.distributed import SINGLE, find_device, process_group, require_single_process
from experiments.training.environment import command_line, environment
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
from experiments.training.reading import read_json
from experiments.training.session import pausing, print_resuming

RUNS = Path("runs/lm")

app = command_group("Language models with block-sparse attention.")
console = Console()


def say(text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)


@app.command()
def corpus(
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="A folder of text, such as /usr/share/doc or the unpacked source of Linux; may be repeated.",
            show_default="Python's standard library",
        ),
    ] = None,
    suffix: Annotated[
        list[str] | None, typer.Option(help="Read only these files: .py, .rst, ...; may be repeated.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Skip folders of this name; may be repeated.")] = None,
    packages: Annotated[
        bool,
        typer.Option(
            help="Join the files of each package (a folder inside --from) into one document; whole packages validate, "
            "chosen by the hash of their names."
        ),
    ] = False,
    vocabulary: Annotated[int, typer.Option(min=256, help=f"{HELP['vocabulary']} It is trained on the text.")] = 50_304,
    megabytes: Annotated[float | None, typer.Option(help="Maximum size of the text.", show_default="all")] = None,
    validation: Annotated[
        float, typer.Option(help="The share of files or packages to validate on.")
    ] = VALIDATION_SHARE,
    books: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --from: an archive of whole novels, or a folder of archives books*.tar.xz, with files "
            "books/{train,test}/AUTHOR___TITLE.txt. A tenth of the authors in train validates, those in test test."
        ),
    ] = None,
    pack: Annotated[
        Path | None,
        typer.Option(help="Also write the tokens as one compressed file, which --data takes on another machine."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the tokens, which is replaced.")] = Path("data/lm"),
) -> None:
    """Make a corpus from text on this machine: find files, drop copies, split, tokenise.

    Each text is taken once; near copies are kept. The hash of a file's text decides whether it trains or validates.
    """
    with short_errors():
        if megabytes is not None and not 0 < megabytes < float("inf"):
            raise ValueError(f"--megabytes must be a positive number; got {megabytes:g}")
        if not 0 < validation < 1:
            raise ValueError(f"--validation must be between 0 and 1; got {validation:g}")
        check_replaceable(out)
        most = None if megabytes is None else round(megabytes * 2**20)
        if books is not None:
            parts = novels(books, most)
            authors = {name: sorted({novel.book.author for novel in part}) for name, part in parts.items()}
            facts = {"authors": authors, "novels": {name: [each.name for each in part] for name, part in parts.items()}}
            store = make_parts(parts, out, vocabulary, say, facts)
            if pack is not None:
                write_packed(store, pack)
            return
        excluded = [*(exclude or ()), *(() if source else session.INSTALLED)]
        found = find(source or [session.standard_library()], suffix or (), excluded, packages)
        if most is not None:
            found = found.limited(most)
        console.print(
            f"{found.files:,} files in {len(found.documents):,} documents; left out: {found.duplicates:,} copies, "
            f"{found.skipped:,} that are no text, too short or too long",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
        store = make(found, out, vocabulary, say, validation)
        if pack is not None:
            write_packed(store, pack)


def write_packed(store: Store, path: Path) -> None:
    pack_store(store, path)
    say(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0.8,
    top: Annotated[int, typer.Option(min=0, help="Sample from this many likeliest tokens; 0: from all.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the choices.")] = 0,
    device: Device = "auto",
) -> None:
    """Let a trained model continue a text."""
    with short_errors():
        require_single_process("sample")
        model, config, tokenizer = opened(run, find_device(device))
        (begun,) = tokenizer.encode([prompt])
        if len(begun) == 0:
            raise ValueError("--prompt must not be empty")
        added = continued(
            model, begun.tolist(), tokens, context=config.context, temperature=temperature, top=top, seed=seed
        )
    print(prompt + tokenizer.decode(added))


@app.command("show")
def show_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or the folder of a measurement.")],
    out: Annotated[Path, typer.Option(help="Picture to write.")] = RUNS / "runs.png",
) -> None:
    """Compare runs: a table, and plots of loss over minutes and tokens, of speed, and of loss by position.

    For the folder of a measurement by `bench`: tokens/s, MFU and memory over the context.
    """
    with short_errors():
        if len(runs) == 1 and (runs[0] / "bench.json").is_file():
            bench_plot.plot(runs[0] / "bench.json", out)
            console.print(f"Plots: {out}", soft_wrap=True)
            return
        found = [show.read(run) for run in runs]
        show.plot(found, out)
    console.print(show.table(found))
    console.print(f"Plots: {out}", soft_wrap=True)


@app.command()
@settings_as_options(Config)
def train(
    preset: Annotated[
        str | None,
        typer.Option(help=f"Preset sizes; other options change them: {', '.join(PRESETS)}.", show_default="124M's"),
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
    record: Record = None,
) -> None:
    """Train a language model on text, and write its validation loss. A preset changes the defaults below.

    On several GPUs of one machine: torchrun --nproc-per-node=2 -m experiments.lm train ..., with --sharding fsdp to
    shard weights and optimiser. With --context-parallel N, N processes share each sequence.
    """
    with short_errors():
        if resume:
            saved = saved_run(folder_to_resume(out, preset=preset, overwrite=overwrite))
            config, data = resumed(saved.config, chosen), data or saved.data
        else:
            config = configure(preset, chosen)
            if config.steps is None and config.minutes is None:
                raise ValueError("a run must have an end: give --minutes or --steps")
        if data is None:
            raise ValueError("--data must name a folder of text; make one with: python -m experiments.lm corpus")
        folder = out or RUNS / default_name(preset, config)
        until = deadline(pause_after)
        with process_group(config.device, config.context_parallel) as ranks:
            console.quiet = not ranks.first
            store = session.find_tokens(config, data, ranks, console)
            with pausing(until) as pause:
                metrics = session.train(
                    config, store, folder, resume=resume, overwrite=overwrite, pause=pause, ranks=ranks,
                    console=console,
                )  # fmt: skip
            if metrics is None:
                print_resuming(console, "experiments.lm", folder, ranks)
            else:
                console.print(
                    f"Validation loss {metrics['val_loss']:.4f} after {metrics['tokens']:,} tokens in "
                    f"{metrics['seconds'] / 60:.1f} minutes: {folder}/metrics.json",
                    soft_wrap=True, highlight=False,
                )  # fmt: skip
                if not ranks.first:
                    return
                if record is not None:
                    command = command_line("experiments.lm", without=LOCAL)
                    records.record(record, current_run(find_device(config.device), command, seed=config.seed), metrics)
                if find_spec("matplotlib") is None:
                    console.print(f"For plots: pip install matplotlib; python -m experiments.lm show {folder}")
                else:
                    show.plot([show.read(folder)], folder / "run.png")
                    console.print(f"Plots: {folder}/run.png", soft_wrap=True)


def default_name(preset: str | None, config: Config) -> str:
    return f"{preset or 'default'}-{compare.slug(config.pattern)}-{config.context}"


@app.command("test")
def test_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    data: Annotated[Path, typer.Option(help="Tokens with a part for testing, as `corpus --books` makes.")],
    tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens for the loss.")] = 2_097_152,
    examples: Annotated[int, typer.Option(min=0, help="Places of the probe at each distance; 0: no probe.")] = 16,
    device: Device = "auto",
) -> None:
    """Test a finished run on the texts of other authors: loss, by position, and whether the far context is used.

    The probe repeats passages and looks for names that were read 512 to 49,152 tokens before, and compares the loss
    with a context without them.
    """
    with short_errors():
        require_single_process("test")
        place = find_device(device)
        store = opened_or_unpacked(data)
        path = tested.write(run, tested.test(run, store, place, tokens=tokens, examples=examples, say=say))
    say(f"Written to {path}")


@app.command("generate")
def generate_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    data: Annotated[Path, typer.Option(help="Tokens from `corpus`; prompts are passages of its validation text.")],
    batch: Annotated[list[int] | None, typer.Option(help="Sequences at once; may be repeated.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens that are timed.")] = 64,
    device: Device = "auto",
    commit: Annotated[str | None, typer.Option(help="The commit to note.", show_default="git's")] = None,
    record: Record = None,
) -> None:
    """Measure tokens a second of a finished run that generates with a cache, after prompts that fill its context.

    For the patterns dense, local and chosen blocks; layers may have different ones.
    """
    with short_errors():
        require_single_process("generate")
        place = find_device(device)
        model, config, _ = opened(run, place)
        part = opened_or_unpacked(data).val
        prompt = generate.prompt_tokens(config, tokens)
        found = generate.all_measured(model, config, part, batch or [1, 16], prompt, tokens, say)
        command = command_line("experiments.lm", without=LOCAL)
        records.record_generation(record, run_of(environment(place, command, commit), seed=config.seed), config, found)


@app.command("compare")
@settings_as_options(Config, *(name for name in DEFAULTS if name not in compare.NOT_CHOSEN))
def compare_command(
    case: Annotated[
        list[str],
        typer.Option(help="presets:contexts:patterns:implementations, as for `bench`; may be repeated."),
    ],
    data: Annotated[Path, typer.Option(help="Folder of UTF-8 files, or of tokens that `corpus` has made.")],
    *,
    chosen: dict[str, Any],
    out: Annotated[Path, typer.Option(help="Folder of the runs and of their table.")] = RUNS / "compare",
    pause_after: PauseAfter = None,
    lrs: Annotated[
        str | None,
        typer.Option(
            help="Peak learning rates, with commas between them: each case with each.", show_default="preset's"
        ),
    ] = None,
    lr_from: Annotated[
        Path | None,
        typer.Option(help="Folder of a complete comparison: the learning rate with the lowest loss of each case."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between them.")] = "0",
    commit: Annotated[str | None, typer.Option(help="The commit to note.", show_default="git's")] = None,
    record: Record = None,
) -> None:
    """Train runs with different attention, one after the other. Compare their losses after equal minutes, after
    equal tokens, and by position in the context.

    The same command resumes a paused comparison and keeps complete runs.
    """
    with short_errors():
        require_single_process("compare")
        cases = [each for text in case for each in parsed(text)]
        rates = compare.rates_of(lrs)
        if (rates != []) + (lr_from is not None) + ("lr" in chosen) > 1:
            raise ValueError("--lr, --lrs and --lr-from name learning rates: give one of them")
        if len(rates) > 1 and record is not None:
            raise ValueError("--record keeps one run of each case and seed: choose a rate, by --lr-from say")
        tuned = None if lr_from is None else compare.tuned_in(lr_from, cases)
        configs = compare.configs_of(cases, chosen, rates, series.parsed(seeds), tuned)
        first = next(iter(configs.values()))
        if any(config.steps is None and config.minutes is None for config in configs.values()):
            raise ValueError("the runs must have an end: give --minutes or --steps")
        command = command_line("experiments.lm", without=LOCAL)
        facts = environment(find_device(first.device), command, commit)
        until = deadline(pause_after)
        store = session.find_tokens(first, data, SINGLE, console)
        with pausing(until) as pause:
            complete = compare.train_all(configs, store, out, pause, facts, console)
        if not complete:
            console.print("Go on with the same command", soft_wrap=True)
            return
        page = compare_report.write(out, list(configs), store)
        for name, config in configs.items() if record is not None else ():
            made = read_json(out / name / compare.ENVIRONMENT, "the environment of a run")
            records.record(record, run_of(made, seed=config.seed), show.read(out / name).metrics or {})
    print(page)
    console.print(f"Tables and plots: {out}/compare.md, compare.csv, compare.json, losses.csv", soft_wrap=True)


@app.command("bench")
@settings_as_options(
    Config, "head_dim", "kv_heads", "positions", "vocabulary", "window", "block", "compiled", "recompute", "precision",
    "micro_tokens",
)  # fmt: skip
def bench_command(
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="presets:contexts:patterns:implementations, each a comma-separated list, such as "
            f"{DEFAULT[0]}; may be repeated. In a pattern, + joins alternating layers.",
            show_default="what the README's table shows",
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Time limit; rows that did not start are marked.")] = 5.0,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step, at least one sequence.")] = 65_536,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each row.")] = 3,
    recorded: Annotated[bool, typer.Option("--recorded", help="Measure each row again with CUDA graphs.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="List the kernels of each row's step in kernels.csv.")
    ] = False,
    *,
    chosen: dict[str, Any],
    device: Device = "auto",
    commit: Annotated[str | None, typer.Option(help="The commit to note.", show_default="git's")] = None,
    record: Annotated[Path | None, typer.Option(help="File of measurements to write.", show_default="none")] = None,
    out: Annotated[Path, typer.Option(help="Folder for bench.csv and bench.json.")] = RUNS / "bench",
) -> None:
    """Measure whole training steps on random tokens: tokens/s, MFU and memory, in turns."""
    with short_errors():
        require_single_process("bench")
        place = find_device(device)
        cases = [each for text in case or DEFAULT for each in parsed(text)]
        options = bench.Options(minutes, tokens, rounds, recorded=recorded, profiled=profile, chosen=chosen)
        facts = environment(place, command_line("experiments.lm", without=LOCAL), commit)
        rows = bench.measure(cases, options, place, say)
        bench_report.write(out, rows, facts, {"minutes": minutes, "tokens": tokens, "rounds": rounds, **chosen})
        records.record_steps(record, run_of(facts), rows)
    console.print(bench_report.table(rows))
    console.print(f"{facts['device']}, torch {facts['torch']}: {out}/bench.csv, bench.json", soft_wrap=True)
