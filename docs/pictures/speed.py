"""Measured speed over density beside other libraries, from the stored runs of `experiments.benchmarks.speed`."""

from functools import partial

from matplotlib.figure import Figure

from docs.figures.store import Stored, stored
from experiments.lm.flops import PEAKS
from experiments.measurements import Measurement

RUNS = ("speed/h200", "speed/h100")  # newest first; times of different runs are never compared
PEERS = {  # colours that colour-blind readers can tell apart (Okabe and Ito)
    "sparseflash": ("sparseflash", "#000000", "o", "-"),
    "fa4": ("FlashAttention-4", "#D55E00", "^", "-"),
    "flex": ("FlexAttention", "#0072B2", "s", "-"),
    "sdpa-cudnn": ("cuDNN", "#CC79A7", "P", ""),
}
PEAK = round(PEAKS["H200"] / 1e12)  # TFLOP/s of dense bf16 products, an H100's as well
NAMES = {"random12": "random"}  # masks, as the tables name them
MASKS = ("butterfly", "local", "bigbird", "random12", "causal", "dense")


def timed(run: Stored, head_dim: int, direction: str, peer: str) -> dict[str, Measurement]:
    """The times of the six masks in a run, by mask; those that failed are left out."""
    names = {f"speed/{mask}/{head_dim}/{direction}/{peer}": mask for mask in MASKS}
    return {names[each.name]: each for each in run.measurements if each.name in names and each.value}


def speed_over_density(head_dim: int) -> Figure:
    """Useful TFLOP/s of forward and backward, one line of panels a run: higher is faster, level is proportional."""
    figure = Figure(figsize=(8.6, 5.6), layout="constrained")
    handles = {}
    for line, key in zip(figure.subplots(len(RUNS), 2, sharey="row"), RUNS):
        run = stored()[key]
        live = {mask: each.settings["live"] for mask, each in timed(run, head_dim, "forward", "sparseflash").items()}
        masks = sorted(live, key=lambda mask: live[mask])  # sparsest first
        for axis, direction in zip(line, ("forward", "backward")):
            for peer in reversed(PEERS):
                name, colour, marker, style = PEERS[peer]
                found = timed(run, head_dim, direction, peer)
                if found:
                    speeds = {
                        mask: found[mask].settings["flops"] / found[mask].value / 1e9 for mask in masks if mask in found
                    }
                    (handles[name],) = axis.plot(
                        [masks.index(mask) for mask in speeds], list(speeds.values()), style or " ", color=colour,
                        marker=marker, markersize=6, linewidth=1.2, label=name,
                    )  # fmt: skip
            axis.set_xticks(range(len(masks)), [f"{NAMES.get(mask, mask)}\n{100 * live[mask]:.3g} %" for mask in masks])
            axis.tick_params(labelsize=8)
            handles["peak of the tensor cores"] = axis.axhline(PEAK, color="#555555", linestyle=":", linewidth=1.2)
            axis.set_ylim(bottom=0)
            axis.grid(axis="y", alpha=0.3)
            axis.set_title(direction, fontsize=8.5)
        line[0].set_ylabel(f"{run.run.device.split()[1]}: useful TFLOP/s", fontsize=9)
    names = [*(name for name, *_ in PEERS.values() if name in handles), "peak of the tensor cores"]
    figure.legend(
        [handles[name] for name in names], names, loc="outside lower center", ncols=6, fontsize=8, frameon=False
    )
    heads = 2048 // head_dim
    figure.suptitle(
        f"Speed by share of live scores: 16,384 tokens, {heads} heads, D={head_dim}, bf16, blocks of 128", fontsize=10.5
    )
    return figure


FIGURES = {f"speed-d{head_dim}.png": partial(speed_over_density, head_dim) for head_dim in (128, 64)}
