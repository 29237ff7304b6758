"""python -m tests.limits [--case NAME] [--device cpu] [--commit C] [--out FILE or FOLDER]"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.benchmarks.harness import Bench, Commit, Device, Out, chosen, reason, slug
from experiments.benchmarks.interpreter import run_kernels_on

ALLOWED = "of what is allowed"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def limits(
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

    from experiments.benchmarks.timing import first_call
    from sparseflash.backends.triton.architecture import architecture_of
    from tests.limits.cases import CASES, Scale, compared

    names = chosen("--case", case, CASES)
    bench = Bench.start("exactness", device, commit, out)
    at = Scale(bench.device, tiny=device == "cpu")
    is_hopper = device != "cpu" and architecture_of(torch.cuda.get_device_capability()).has_wgmma
    dtype = str(at.dtype).removeprefix("torch.")
    for name in names:
        for backend in CASES[name][1]:
            if backend == "hopper" and not is_hopper:
                continue
            path = f"large/{slug(name)}/{dtype}"
            try:
                seconds, found = first_call(lambda: list(compared(name, backend, at)), at.device)  # noqa: B023
            except (RuntimeError, ValueError) as failure:
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
