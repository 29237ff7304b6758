"""`python -m experiments.benchmarks.blocks.fit`: the constants of the plan's cost, from measured times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from experiments import measurements
from experiments.benchmarks.tune.space import parse
from experiments.training.cli_errors import short_errors
from experiments.training.reading import reading
from sparseflash.backends.triton.architecture import architecture_of
from sparseflash.backends.triton.portable.fitting import config_for
from sparseflash.backends.triton.portable.occupancy import held_and_streamed
from sparseflash.backends.triton.schedule.tilings import HALF, Cost, Tiling, cheapest

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(width=120)

FITTED = ("loading", "loading_gathered", "step", "program")
_ALIKE = ["dim", "kernel"]  # the columns that share a unit of time
_CASE = ["kind", "block", *_ALIKE]  # the columns that identify a choice
_LEAST, _MOST = 0.02, 20.0  # bounds of a constant


@app.command()
def main(
    times: Annotated[list[Path], typer.Argument(help="blocks.jsonl of one run or of several on one GPU.", exists=True)],
    without: Annotated[list[str] | None, typer.Option(help="Leave out this kind of mask; may be repeated.")] = None,
    shipped: Annotated[
        bool,
        typer.Option("--shipped", help="Leave out tiles and warps other than those that Hopper's tables have now."),
    ] = False,
) -> None:
    """Fit the constants of `sparseflash.backends.triton.schedule.tilings.Cost`, and report how well they choose.

    scatter: standard deviation of log(time / cost). choice: time of the chosen tiling relative to the fastest, averaged
    over the masks and kernels with more than one timed tiling.
    """
    with short_errors():
        frame = read(times, without or (), shipped=shipped)
    fitted = fit(frame)
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", *FITTED, "scatter", "choice", "at worst"):
        table.add_column(column, justify="right")
    for name, cost in (("shipped", HALF), ("fitted", fitted)):
        choices = chosen(frame, cost)
        numbers = [getattr(cost, field) for field in FITTED]
        numbers += [scatter(frame, cost), choices.slower.mean(), choices.slower.max()]
        table.add_row(name, *(f"{number:.3g}" for number in numbers))
    console.print(table)
    console.print(
        f"{len(frame)} times, {len(choices)} choices. Where the fitted costs choose what takes over 2 % longer:"
    )
    for case in choices[choices.slower > 1.02].itertuples():
        console.print(
            f"{case.kind} in blocks of {case.block}, D={case.dim}, {case.kernel}: {case.tiling} in {case.ms:.3f} ms, "
            f"{case.best} in {case.fastest:.3f} ms"
        )


def read(paths: Sequence[Path], without: Sequence[str] = (), *, shipped: bool = False) -> pd.DataFrame:
    """The measured times; if a tiling and configuration was timed more than once, the first. `shipped`: keep only the
    fastest configuration of each tiling that would run today.
    """
    frame = pd.concat([_times(path) for path in paths], ignore_index=True)
    frame = frame[~frame.kind.isin(without)]
    if shipped:
        frame = frame[[would_run(row) for row in frame.itertuples()]].sort_values("ms", kind="stable")
    return frame.drop_duplicates([*_CASE, "tiling"] if shipped else [*_CASE, "tiling", "config"]).reset_index(drop=True)


def _times(path: Path) -> pd.DataFrame:
    with reading(path, "blocks.jsonl of a run"):
        found = pd.DataFrame([each.settings | {"ms": each.value} for each in measurements.read(path)[1]])
        found[[*_CASE, "tiling", "config", "tiles", "length", "ms"]]  # raises KeyError for a missing column
    return found


def would_run(row: Any) -> bool:
    """Whether a time was measured with the tiles and warps that an H100 uses for that tiling, by descriptors or by
    pointers.
    """
    held, streamed, _ = map(int, row.tiling.split("x"))
    block = held_and_streamed(row.kernel, (held, streamed))
    ways = (config_for(row.kernel, architecture_of((9, 0)), "half", row.dim, block, way) for way in (True, False))
    return parse(row.config)[:3] in [config[:3] for config in ways]


def fit(frame: pd.DataFrame) -> Cost:
    """The constants that make costs most nearly proportional to times, on a logarithmic scale."""

    def residuals(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        return deviations(frame, HALF._replace(**dict(zip(FITTED, np.exp(logarithms), strict=True))))

    start = np.log([getattr(HALF, field) for field in FITTED])
    found = least_squares(residuals, start, bounds=(np.log(_LEAST), np.log(_MOST)))
    return HALF._replace(**dict(zip(FITTED, (float(x) for x in np.exp(found.x)), strict=True)))


def costs(frame: pd.DataFrame, cost: Cost) -> NDArray[np.float64]:
    """The cost of each row, for one head."""
    found = []
    for row in frame.itertuples():
        tiling = Tiling(*map(int, row.tiling.split("x")))
        config = parse(row.config)
        tile = held_and_streamed(row.kernel, config[:2])
        found.append(cost.of_tiles(row.tiles, tiling, tile, row.length, config.num_warps))
    return np.array(found)


def deviations(frame: pd.DataFrame, cost: Cost) -> NDArray[np.float64]:
    """log(cost / time) of each row, less its mean over the rows of that kernel and head dim."""
    ratio = pd.Series(np.log(costs(frame, cost) / frame.ms.to_numpy()), index=frame.index)
    found: NDArray[np.float64] = (ratio - ratio.groupby([frame[name] for name in _ALIKE]).transform("mean")).to_numpy()
    return found


def scatter(frame: pd.DataFrame, cost: Cost) -> float:
    """The standard deviation of `deviations`."""
    return float(np.sqrt((deviations(frame, cost) ** 2).mean()))


def chosen(frame: pd.DataFrame, cost: Cost) -> pd.DataFrame:
    """For each case with more than one tiling, the one that `tilings.choose` would take, and the fastest."""
    rows = []
    for case, same in frame.assign(cost=costs(frame, cost)).groupby(_CASE):
        if len(same) == 1:
            continue
        own_first = same.sort_values("tiling", key=lambda tiling: tiling != f"{case[1]}x{case[1]}x0", kind="stable")
        taken = own_first.iloc[cheapest(own_first.cost.to_list(), cost.worth)]
        fastest = same.loc[same.ms.idxmin()]
        rows.append((*case, taken.tiling, taken.ms, fastest.tiling, fastest.ms, taken.ms / fastest.ms))
    return pd.DataFrame(rows, columns=[*_CASE, "tiling", "ms", "best", "fastest", "slower"])


if __name__ == "__main__":
    app()
