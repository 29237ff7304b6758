"""Speed-ups as bars for each task, accuracies as a dot for each setting."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from experiments.lra.table.report import PAPER, TITLES, Results, compared, matching, mean_speedup
from experiments.lra.table.shapes import FIVE, VARIANTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(results: Results, path: Path) -> Path | None:
    # Imported here, because matplotlib takes a second to import and other commands draw nothing.
    from matplotlib.figure import Figure

    panels = [panel for panel, needs in ((_speeds, results.times), (_accuracies, results.accuracies)) if needs]
    if not panels:
        return None
    figure = Figure(figsize=(11, 4.2 * len(panels)), layout="constrained")
    for panel, axes in zip(panels, figure.subplots(len(panels), 1, squeeze=False)[:, 0], strict=True):
        panel(results, axes)
    if results.facts:
        figure.suptitle(", ".join(results.facts[name] for name in ("device", "date") if name in results.facts))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


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
        label = f"FlashAttention paper, {name}: {PAPER[name][0]:.1f}"
        axes.axhline(PAPER[name][0], color="grey", linestyle=style, linewidth=1, label=label)
    axes.set_ylabel("speed of a training step,\ntimes that of standard attention")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _accuracies(results: Results, axes: Axes) -> None:
    tasks = [task for task in FIVE if any(task == each.task for each in results.accuracies)]
    tasks += sorted({each.task for each in results.accuracies} - set(tasks))
    variants = [variant for variant in VARIANTS if any(variant == each.variant for each in results.accuracies)]
    for number, variant in enumerate(variants):
        color = f"C{list(VARIANTS).index(variant)}"
        for group, task in enumerate(tasks):
            place = group + (number - (len(variants) - 1) / 2) * 0.8 / len(variants)
            # No rule selects one of several settings, so all are shown.
            for each in matching(results.accuracies, task, variant):
                has_more = each.helps != "none" or each.initial != "nothing"
                axes.errorbar(
                    place, 100 * each.mean, 100 * (each.std or 0.0), fmt="o", capsize=2, color=color,
                    markerfacecolor="white" if has_more else color,
                )  # fmt: skip
        axes.plot([], [], "o", color=color, label=TITLES[variant])
    axes.plot(
        [],
        [],
        "o",
        color="grey",
        markerfacecolor="white",
        label="other inputs, or other training before,\nthan the arena's models have: table.md",
    )
    axes.spines[["top", "right"]].set_visible(False)
    for group, task in enumerate(tasks):
        best = max(each.best_rule_accuracy for each in results.accuracies if each.task == task)
        label = "best rule that avoids the task" if group == 0 else None
        axes.plot(
            [group - 0.45, group + 0.45], [100 * best] * 2, color="black", linestyle="--", linewidth=1, label=label
        )
    axes.set_xticks(range(len(tasks)), [task.replace(", ", ",\n") for task in tasks])
    axes.set_ylabel("test accuracy, %")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
