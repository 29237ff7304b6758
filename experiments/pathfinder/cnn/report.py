from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.pathfinder.cnn.results import Figure, as_rule
from experiments.pathfinder.report import markdown

HEAD = ["images of", "test images", "answered by", "accuracy", "nearest", "near", "far", "farthest", "borders, px"]
COST = ["images of", "weights", "trained on", "images seen", "minutes", "images/s", "training accuracy", "device"]


def report(figures: Sequence[Figure]) -> str:
    answered = [row for figure in figures for row in rows(figure)]
    commands = "\n".join(f"- {figure['images_of']}: `{figure['command']}`\n  {made_with(figure)}" for figure in figures)
    return (
        "# A small 2-D CNN\n\n"
        "Generated with the parameters of the Long Range Arena, not the released images. Accuracy in percent (chance:\n"
        "50) with its standard error, and in quarters of the marker distance, of residual networks of 3 x 3\n"
        "convolutions, one for each kind of images. Above each network are the rules of [shortcuts.md](shortcuts.md)\n"
        "for the same kind. Longer training may reach more.\n\n"
        f"{markdown(HEAD, answered)}\n\n"
        "Costs. The training accuracy is the mean of at most the last twenty steps.\n\n"
        f"{markdown(COST, map(cost, figures))}\n\n{commands}\n"
    )


def rows(figure: Figure) -> list[list[str]]:
    quarters = figure["by_distance"]
    borders = " ".join(f"{border:.0f}" for border in quarters["borders_px"])
    answered = [*quarters["rules"], as_rule(figure)]
    return [
        [figure["images_of"], f"{each['images']:,}", each["rule"],
         f"{100 * each['accuracy']:.1f} ± {100 * each['error']:.1f}", *map(percent, each["by_distance"]), borders]
        for each in answered
    ]  # fmt: skip


def cost(figure: Figure) -> list[str]:
    spent = figure["cost"]
    seen = f"{spent['images']:,}"
    if spent["different_images"] < spent["images"]:
        seen += f", {spent['different_images']:,} different"
    return [
        figure["images_of"], f"{figure['weights']:,}", figure["trained_on"], seen, f"{spent['seconds'] / 60:.1f}",
        f"{spent['images_per_s']:,.0f}", percent(figure["last_training"]["accuracy"]), figure["device"],
    ]  # fmt: skip


def made_with(figure: Figure) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in figure["versions"].items())
    return f"({versions}; {figure['device']}, {figure['cores']} CPU cores)"


def percent(part: Any) -> str:
    return "-" if part is None else f"{100 * part:.1f}"
