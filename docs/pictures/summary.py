"""The picture of speed on the first page: one run, both passes, and the GPU's limit."""

from matplotlib.figure import Figure

from docs.figures.store import stored
from docs.pictures.speed import NAMES, PEERS, timed
from experiments.lm.flops import PEAKS

RUN = "speed/h200"
LIMIT = round(PEAKS["H200"] / 1e12)  # TFLOP/s of dense bf16 products, by the data sheet
SHOWN = ("sparseflash", "fa4", "flex", "sdpa-cudnn")
SDPA = {"sdpa-cudnn": "SDPA (cuDNN)"}  # as the README names it
WIDTH = 0.2  # of a bar; masks stand 1 apart


def speed() -> Figure:
    """Useful TFLOP/s by mask at D=128, forward and backward, below the GPU's limit."""
    figure = Figure(figsize=(8.6, 3.1), layout="constrained")
    run, handles = stored()[RUN], {}
    for axis, direction in zip(figure.subplots(1, 2, sharey=True), ("forward", "backward")):
        ours = timed(run, 128, direction, "sparseflash")
        masks = sorted(ours, key=lambda mask: ours[mask].settings["live"])  # sparsest first
        for place, peer in enumerate(SHOWN):
            colour = PEERS[peer][1]
            found = timed(run, 128, direction, peer)
            speeds = {mask: found[mask].settings["flops"] / found[mask].value / 1e9 for mask in masks if mask in found}
            at = [masks.index(mask) + WIDTH * (place - (len(SHOWN) - 1) / 2) for mask in speeds]
            handles[peer] = axis.bar(at, list(speeds.values()), WIDTH, color=colour)
        axis.axhline(LIMIT, color="#666666", linestyle="--", linewidth=1)
        axis.text(-0.4, LIMIT - 18, f"the GPU's limit: {LIMIT} TFLOP/s", fontsize=7.5, color="#444444", va="top")
        axis.set_xticks(
            range(len(masks)),
            [f"{NAMES.get(mask, mask)}\n{100 * ours[mask].settings['live']:.3g} %" for mask in masks],
            fontsize=7.5,
        )
        axis.tick_params(axis="y", labelsize=8)
        axis.set_ylim(0, 1.06 * LIMIT)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        axis.set_title(direction, fontsize=9)
    figure.axes[0].set_ylabel("useful TFLOP/s", fontsize=9)
    device = run.run.device.removeprefix("NVIDIA ")
    figure.suptitle(
        f"{device}, 16,384 tokens, 16 heads, D=128, bf16; below each mask its share of live scores", fontsize=9.5
    )
    names = [SDPA.get(peer, PEERS[peer][0]) for peer in SHOWN]
    figure.legend(
        [handles[peer] for peer in SHOWN], names, loc="outside lower center", ncols=4, fontsize=8.5, frameon=False
    )
    return figure


FIGURES = {"summary-speed.png": speed}
