"""`python -m experiments.benchmarks.exactness`: how exact results are.

SPARSEFLASH_EXACTNESS=records pytest -m gpu tests/backends/test_exactness.py
python -m experiments.benchmarks.exactness drawn records --about "one H100" --out experiments/results/exactness.md
python -m experiments.benchmarks.exactness large --out runs/exactness
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.exactness.summary import markdown, read
from experiments.benchmarks.interpreter import run_kernels_on
from experiments.training.atomic_files import write_csv
from experiments.training.cli_errors import short_errors

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(width=120)


@app.command()
def drawn(
    records: Annotated[list[Path], typer.Argument(exists=True, help="Files or folders of *.jsonl records.")],
    about: Annotated[
        list[str] | None, typer.Option(help="Device, versions, command; may be repeated, a line each.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the page here too.")] = None,
) -> None:
    """Condense the records that the exactness tests leave. Exits with 1 if a case exceeds what is allowed."""
    with short_errors():
        frame = read(records)
    page = markdown(frame, about or [])
    print(page, end="")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    if (frame["worst"] > 1).any():
        raise typer.Exit(1)


@app.command()
def large(
    case: Annotated[list[str] | None, typer.Option(help="May be repeated.", show_default="all")] = None,
    device: Annotated[str, typer.Option(help="cuda; or cpu, a test of this command with tiny sizes.")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="The measured commit, if git cannot tell.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of large.csv.")] = Path("runs/exactness"),
) -> None:
    """Compare cases near numeric limits with fp64: positions past 2^24, large strides, more than 2^31 elements.

    Takes about two minutes (estimated) and 60 GB of an H200. Exits with 1 if an error exceeds its tolerance or a case
    fails.
    """
    run_kernels_on(device)
    import torch

    from experiments.benchmarks.exactness.large import CASES, Scale, compared
    from experiments.benchmarks.timing import first_call
    from experiments.training.environment import command_line, environment

    names = case or list(CASES)
    if unknown := set(names) - set(CASES):
        raise typer.BadParameter(f"case must be of {'; '.join(CASES)}; got {', '.join(sorted(unknown))}")
    at = Scale(torch.device(device), tiny=device != "cuda")
    is_hopper = device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    facts = environment(at.device, command_line("experiments.benchmarks.exactness"), commit)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    failures = 0
    table = Table(box=box.SIMPLE)
    for column in ("case", "backend", "result", "error", "allowed", "ratio", "s"):
        table.add_column(column, justify="left" if column in ("case", "backend", "result") else "right")
    for name in names:
        for backend in CASES[name][1]:
            if backend == "hopper" and not is_hopper:
                continue
            try:
                seconds, found = first_call(lambda: list(compared(name, backend, at)), at.device)  # noqa: B023
            except (RuntimeError, ValueError) as failure:  # the other cases still run
                console.print(f"{name}, {backend}: {type(failure).__name__}: {failure}", soft_wrap=True)
                failures += 1
                continue
            for row in found:
                rows.append(row | {"seconds": round(seconds, 1)} | facts)
                table.add_row(
                    name, backend, str(row["result"]), f"{row['error']:.2e}", f"{row['allowed']:.2e}",
                    f"{row['ratio']:.2f}", f"{seconds:.1f}",
                )  # fmt: skip
            write_csv(out / "large.csv", rows)
            if device == "cuda":
                torch.cuda.empty_cache()
    console.print(table)
    if failures or any(row["ratio"] > 1 for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
