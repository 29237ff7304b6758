from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.measurements import Measurement, slug


def table(results: list[dict[str, Any]]) -> str:
    rows = ["| way | accuracy | right block read, by each head | by any head | tokens/s, training |", "|---" * 5 + "|"]
    for each in results:
        shares = (f"{100 * each[name]:.1f} %" for name in ("accuracy", "found", "found_by_any_head"))
        rows.append(f"| {each['way']} | {' | '.join(shares)} | {each['tokens_per_second']:,.0f} |")
    return "\n".join(rows)


def measurements_of(result: dict[str, Any]) -> list[Measurement]:
    """The result of one model: recall/TOKENS/WHAT/WAY, or recall-unmarked/ for queries without their common mark.

    With blocks of another size than the task's, WAY ends with it.
    """
    shares = {
        "right-answers": result["accuracy"],
        "best-of-measurements": max(point["accuracy"] for point in result["curve"]),
        "block-read-by-each-head": result["found"],
        "block-read-by-any-head": result["found_by_any_head"],
    }
    settings = result["settings"]
    task, block = settings["task"], settings["sizes"]["block"]
    of = f"recall{'' if settings['marked'] else '-unmarked'}/{task['tokens']}"
    way = slug(result["way"]) + ("" if block == task["block"] else f"-blocks-of-{block}")
    found = [Measurement(f"{of}/{what}/{way}", 100 * share, None, "%") for what, share in shares.items()]
    return [*found, Measurement(f"{of}/training-speed/{way}", result["tokens_per_second"], None, "tokens/s")]


def save_plot(results: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure  # pyplot needs a display

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    names = {"accuracy": "right answers", "found": "(query, head) that read the right block"}
    for panel, (name, title) in zip(panels, names.items(), strict=True):
        for each in results:
            curve = each["curve"]
            panel.plot([p["step"] for p in curve], [p[name] for p in curve], label=each["way"], linewidth=1.5)
        panel.set(title=title, xlabel="step", ylim=(-0.02, 1.02))
        panel.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=8, loc="center right")
    figure.savefig(path, dpi=150)
