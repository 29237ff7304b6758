"""Speed of the layers that choose their keys beside dense attention, from the stored run of `selection ideas`."""

from matplotlib.figure import Figure

from docs.figures.store import stored

RUN = "selection/h200-ideas"
LENGTHS = (8192, 16_384, 32_768, 65_536)
LAYERS = {  # colours that colour-blind readers can tell apart (Okabe and Ito)
    "VSA": ("VideoSparseAttention", "#CC79A7", "P"),
    "MoBA": ("MixtureOfBlocks", "#0072B2", "s"),
    "MSA": ("BlockSelection", "#000000", "o"),
    "NSA": ("NativeSparseAttention", "#D55E00", "^"),
    "DSA": ("TokenSelection", "#009E73", "D"),
    "QSA": ("SpanSelection", "#E69F00", "v"),
}


def speeds(layer: str, passed: str) -> dict[int, float]:
    """Time of dense attention over the layer's, by length: FlashAttention-4's, or SDPA's where that cannot run. Lengths
    that were not measured are left out.
    """
    ms = {each.name: each.value for each in stored()[RUN].measurements if each.value}
    found = {}
    for tokens in LENGTHS:
        name = f"selection/{layer}/{tokens}/{passed}/"
        if dense := [ms[f"{name}{way}"] for way in ("fa4", "sdpa") if f"{name}{way}" in ms]:
            found[tokens] = dense[0] / ms[f"{name}sparseflash"]
    return found


def speed_over_length() -> Figure:
    """Speed over dense attention's by length, forward and both passes: above the line at 1 the layer is faster."""
    figure = Figure(figsize=(8.6, 3.3), layout="constrained")
    for axis, (passed, title) in zip(
        figure.subplots(1, 2, sharey=True), (("forward", "forward"), ("both", "forward and backward"))
    ):
        axis.axhline(1, color="#555555", linestyle="--", linewidth=1.2)
        for layer, (name, colour, marker) in LAYERS.items():
            found = speeds(layer, passed)
            axis.plot(list(found), list(found.values()), color=colour, marker=marker, linewidth=1.2, label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(LENGTHS, [f"{tokens // 1024}K" for tokens in LENGTHS])
        axis.set_yticks([0.25, 0.5, 1, 2, 4, 8], ["0.25", "0.5", "1", "2", "4", "8"])
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("tokens", fontsize=8.5)
    figure.axes[0].set_ylabel("speed over dense attention's", fontsize=9)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=7.5, frameon=False
    )
    device = stored()[RUN].run.device.removeprefix("NVIDIA ")
    figure.suptitle(
        f"{device}, bf16, choice included; above the dashed line the layer is faster than FlashAttention-4 (NSA with "
        "gradients: SDPA)",
        fontsize=9,
    )
    return figure


FIGURES = {"selection-speed.png": speed_over_length}
