"""`python -m experiments.benchmarks.exactness`: how exact results are.

SPARSEFLASH_EXACTNESS=records pytest -m gpu tests/backends/test_exactness.py
python -m experiments.benchmarks.exactness drawn records --out runs/exactness/drawn.jsonl
python -m experiments.benchmarks.exactness large --out runs/exactness
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.benchmarks.exactness.summary import ALLOWED, condense, read
from experiments.benchmarks.harness import Bench, Commit, Device, Out, chosen, reason, slug
from experiments.benchmarks.interpreter import run_kernels_on
from experiments.measurements import current_run
from experiments.training.cli_errors import short_errors
from experiments.training.distributed import find_device

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def drawn(
    records: Annotated[list[Path], typer.Argument(exists=True, help="Files or folders of *.jsonl records.")],
    about: Annotated[
        list[str] | None, typer.Option(help="How the records were made: the command; may be repeated.")
    ] = None,
    commit: Commit = None,
    out: Out = Path("runs/exactness/drawn.jsonl"),
) -> None:
    """Condense the records that the exactness tests leave. Exits with 1 if a case exceeds the allowed error."""
    with short_errors():
        found = read(records)
    device = find_device("auto")
    run = current_run(device, "python -m experiments.benchmarks.exactness drawn", commit=commit, helped=about or ())
    bench = Bench("exactness", run, out, device)
    condense(bench, found)
    bench.finish()
    worst = max(found, key=lambda each: float(each["worst"]))
    wrong = sum(each["worst"] > 1 for each in found)
    verdict = f"{wrong:,} beyond what is allowed" if wrong else "all within what is allowed"
    print(
        f"{len(found):,} drawn cases, {verdict}; the worst ({worst['dtype']}, {worst['worst']:.3f}): {worst['problem']}"
    )
    if wrong:
        raise typer.Exit(1)


@app.command()
def large(
    case: Annotated[list[str] | None, typer.Option(help="May be repeated.", show_default="all")] = None,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = Path("runs/exactness/large.jsonl"),
) -> None:
    """Compare cases near numeric limits with fp64. Takes about two minutes (estimated) and 60 GB of an H200.

    Exits with 1 if an error exceeds its tolerance or a case fails.
    """
    run_kernels_on(device)  # before Triton is imported
    import torch

    from experiments.benchmarks.exactness.large import CASES, Scale, compared
    from experiments.benchmarks.timing import first_call

    names = chosen("--case", case, CASES)
    bench = Bench.start("exactness", device, commit, out)
    at = Scale(bench.device, tiny=device == "cpu")
    is_hopper = device != "cpu" and torch.cuda.get_device_capability()[0] == 9
    dtype = str(at.dtype).removeprefix("torch.")
    for name in names:
        for backend in CASES[name][1]:
            if backend == "hopper" and not is_hopper:
                continue
            path = f"large/{slug(name)}/{dtype}"
            try:
                seconds, found = first_call(lambda: list(compared(name, backend, at)), at.device)  # noqa: B023
            except (RuntimeError, ValueError) as failure:  # the other cases still run
                bench.add(f"{path}/out/{backend}", None, ALLOWED, failure=reason(failure))
                continue
            for row in found:
                shared = {"error": row["error"], "allowed": row["allowed"], "seconds": round(seconds, 1)}
                bench.add(f"{path}/{row['result']}/{backend}", row["ratio"], ALLOWED, **shared)
            bench.save()
            if device != "cpu":
                torch.cuda.empty_cache()
    bench.finish()
    if any(each.value is None or not each.value <= 1 for each in bench.measurements):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
