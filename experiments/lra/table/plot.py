"""Speed-ups as bars for each task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from experiments.lra.table.report import PAPER, TITLES, Results, compared, mean_speedup
from experiments.lra.table.shapes import FIVE, VARIANTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(results: Results, path: Path) -> None:
    # Imported here, because matplotlib takes a second to import and other commands draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    _speeds(results, figure.subplots())
    figure.suptitle(", ".join(results.facts[name] for name in ("device", "date")))
    figure.savefig(path, dpi=130)


def _bars(axes: Axes, groups: list[str], heights: dict[str, list[float | None]]) -> None:
    width = 0.8 / len(heights)
    for number, (variant, values) in enumerate(heights.items()):
        places = [group + (number - (len(heights) - 1) / 2) * width for group in range(len(groups))]
        shown = [(x, y) for x, y in zip(places, values, strict=True) if y is not None]
        if shown:
            x, y = zip(*shown, strict=True)
            bars = axes.bar(x, y, width, label=TITLES[variant], color=f"C{list(VARIANTS).index(variant)}")
            axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.spines[["top", "right"]].set_visible(False)


def _speeds(results: Results, axes: Axes) -> None:
    chosen = compared(results.times)
    tasks = [task for task in FIVE if any(task == name for name, _ in chosen)]
    variants = [variant for variant in VARIANTS if any(variant == name for _, name in chosen)]
    heights: dict[str, list[float | None]] = {}
    for variant in variants:
        rows = [chosen.get((task, variant)) for task in tasks]
        mean = mean_speedup(results.times, variant)
        heights[variant] = [*(row.speedup if row else None for row in rows), mean[0] if mean else None]
    _bars(axes, [*tasks, "geometric mean"], heights)
    for name, style in (("dense", "--"), ("block-sparse", ":")):
        label = f"FlashAttention paper, {name}: {PAPER[name]:.1f}"
        axes.axhline(PAPER[name], color="grey", linestyle=style, linewidth=1, label=label)
    axes.set_ylabel("speed of a training step,\ntimes that of standard attention")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
