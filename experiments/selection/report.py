"""The table and the picture of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table, one row for each model."""
    rows = ["| way | accuracy | right block read, by each head | by any head | tokens/s, training |", "|---" * 5 + "|"]
    for each in results:
        shares = (f"{100 * each[name]:.1f} %" for name in ("accuracy", "found", "found_by_any_head"))
        rows.append(f"| {each['way']} | {' | '.join(shares)} | {each['tokens_per_second']:,.0f} |")
    return "\n".join(rows)


def save_plot(results: list[dict[str, Any]], path: Path) -> None:
    """Accuracy and share of right blocks over the steps."""
    from matplotlib.figure import Figure  # not pyplot, which needs a display and keeps state

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    names = {"accuracy": "right answers", "found": "(query, head) that read the right block"}
    for panel, (name, title) in zip(panels, names.items(), strict=True):
        for each in results:
            curve = each["curve"]
            panel.plot([p["step"] for p in curve], [p[name] for p in curve], label=each["way"], linewidth=1.5)
        panel.set(title=title, xlabel="step", ylim=(-0.02, 1.02))
        panel.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=8, loc="center right")  # where curves rarely are
    figure.savefig(path, dpi=150)
