"""Measured speed over density beside other libraries, from the stored tables of `experiments.benchmarks.speed`."""

import csv
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results" / "speed"
# Runs, newest first; times of different runs are never compared.
RUNS = {
    "h200-f8db2f94": "sparseflash with its kernels for Hopper",
    "h100-172cb84": "sparseflash with its portable kernels alone",
}
PEERS = {  # colours that colour-blind readers can tell apart (Okabe and Ito)
    "ours": ("sparseflash", "#000000", "o", "-"),
    "fa4": ("FlashAttention-4", "#D55E00", "^", "-"),
    "flex": ("FlexAttention", "#0072B2", "s", "-"),
    "sdpa-cudnn": ("cuDNN", "#CC79A7", "P", ""),
    "sdpa-fa2": ("FlashAttention-2", "#009E73", "v", ""),
}


def rows(run: str, head_dim: int) -> list[dict[str, str]]:
    """The timed rows of the six masks of a run, sparsest first."""
    with open(RESULTS / run / "speed.csv", newline="") as file:
        found = [row for row in csv.DictReader(file) if row["group"] == "masks" and row["status"] == "ok"]
    found = [row for row in found if int(row["head_dim"]) == head_dim and row["peer"] in PEERS]
    return sorted(found, key=lambda row: float(row["density"]))


def speed_over_density(head_dim: int) -> Figure:
    """Useful TFLOP/s of forward and backward, one line of panels a run: higher is faster, level is proportional."""
    figure = Figure(figsize=(8.6, 5.6), layout="constrained")
    handles = {}
    for line, (run, ours) in zip(figure.subplots(len(RUNS), 2, sharey="row"), RUNS.items()):
        found = rows(run, head_dim)
        masks = {row["mask"]: float(row["density"]) for row in found}
        for axis, direction in zip(line, ("forward", "backward")):
            for peer in reversed(PEERS):
                name, colour, marker, style = PEERS[peer]
                mine = {row["mask"]: float(row["tflops"]) for row in found
                        if row["peer"] == peer and row["direction"] == direction}  # fmt: skip
                if mine:
                    places = [list(masks).index(mask) for mask in mine]
                    (handles[name],) = axis.plot(
                        places, list(mine.values()), style or " ", color=colour, marker=marker, markersize=6,
                        linewidth=1.2, label=name,
                    )  # fmt: skip
            axis.set_xticks(range(len(masks)), [f"{mask}\n{100 * share:.3g} %" for mask, share in masks.items()])
            axis.tick_params(labelsize=8)
            axis.set_ylim(bottom=0)
            axis.grid(axis="y", alpha=0.3)
            axis.set_title(f"{direction}: {ours}", fontsize=8.5)
        line[0].set_ylabel(f"{found[0]['device'].replace('NVIDIA ', '').partition(' ')[0]}: useful TFLOP/s", fontsize=9)
    names = [name for name, *_ in PEERS.values() if name in handles]
    figure.legend(
        [handles[name] for name in names], names, loc="outside lower center", ncols=5, fontsize=9, frameon=False
    )
    shape = found[0]
    figure.suptitle(
        f"Speed by share of live scores: {int(shape['length']):,} tokens, {shape['heads']} heads, D={head_dim}, bf16, "
        f"blocks of {shape['block']}",
        fontsize=10.5,
    )
    return figure


FIGURES = {f"speed-d{head_dim}.png": partial(speed_over_density, head_dim) for head_dim in (128, 64)}
