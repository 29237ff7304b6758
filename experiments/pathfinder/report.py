from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from math import hypot, sqrt

from experiments.pathfinder import original
from experiments.pathfinder.parameters import Parameters
from experiments.pathfinder.shortcuts import RULES, Shortcut
from experiments.pathfinder.statistics import COLUMNS, Estimate
from experiments.training.environment import command_line


def about() -> str:
    versions = [f"{name} {version(name)}" for name in ("numpy", "numba", "pillow", "scikit-learn")]
    machine = f"{platform.machine()}, {os.cpu_count()} CPU cores"
    command = command_line("experiments.pathfinder")
    return f"    {command}\n\nPython {platform.python_version()}, {', '.join(versions)}; {machine}."


def statistics_report(found: Sequence[tuple[Parameters, int, dict[str, Estimate]]]) -> str:
    rows = []
    for parameters, images, values in found:
        rows.append([parameters.name, f"{images:,}", *map(str, values.values())])
        if (key := (parameters.size, parameters.contour_length)) in original.STATISTICS and parameters.is_lra:
            counted, rendered, theirs = original.STATISTICS[key]
            rows.append(["original", f"{counted:,} ({rendered:,})", *(str(theirs.get(name, "")) for name in values)])
            rows.append(["apart by", "", *(deviation(values[name], theirs.get(name)) for name in values)])
    meanings = "\n".join(f"- {name}: {meaning}" for name, meaning in COLUMNS.items())
    return (
        "# Statistics of generated Pathfinder images\n\n"
        "Generated with the parameters of the Long Range Arena, not the released images. Means over images and their\n"
        f"standard errors.\n\n{meanings}\n"
        '- "original": drewlinsley/pathfinder at commit ab9c130 (see `experiments/pathfinder/original.py`); in\n'
        "  parentheses, the number of rendered images\n"
        '- "apart by": the difference divided by its standard error\n\n'
        f"{markdown(['images of', 'images', *COLUMNS], rows)}\n\n{about()}\n"
    )


def deviation(ours: Estimate, theirs: Estimate | None) -> str:
    if theirs is None:
        return ""
    error = hypot(ours.error, theirs.error)
    return f"{(ours.mean - theirs.mean) / error:+.1f}" if error else f"{ours.mean - theirs.mean:+g}"


def shortcuts_report(
    found: Sequence[tuple[Parameters, list[Shortcut]]], compared: Sequence[tuple[Parameters, int, list[Shortcut]]]
) -> str:
    rows = []
    for parameters, shortcuts in found:
        for shortcut in shortcuts:
            quarters = [f"{100 * accuracy:.1f}" for accuracy in shortcut.by_distance]
            borders = " ".join(f"{border:.0f}" for border in shortcut.distances)
            accuracy = f"{100 * shortcut.accuracy:.1f} ± {100 * shortcut.error:.1f}"
            rows.append([parameters.name, f"{shortcut.images:,}", shortcut.rule, accuracy, *quarters, borders])
    head = ["images of", "images", "rule", "accuracy", "nearest", "near", "far", "farthest", "borders, px"]
    comparison = []
    for parameters, sets, shortcuts in compared:
        images, *theirs = original.SHORTCUTS[parameters.size, parameters.contour_length]
        row = [parameters.name, f"{images:,}"]
        for shortcut, accuracy in zip(shortcuts, theirs):
            error = sqrt(accuracy * (1 - accuracy) / images)
            error = hypot(error, error / sqrt(sets))
            apart = (shortcut.accuracy - accuracy) / error
            row += [f"{100 * shortcut.accuracy:.1f}", f"{100 * accuracy:.1f}", f"{100 * error:.1f}", f"{apart:+.1f}"]
        comparison.append(row)
    columns = [f"{rule}: {what}" for rule in RULES for what in ("ours", "original", "standard error", "apart by")]
    beside = (
        "Comparison with the original generator's images, in sets of equal size (ours: the mean of several sets;\n"
        "standard errors of the difference):\n\n"
        f"{markdown(['images of', 'images', *columns], comparison)}\n\n"
    )
    beside = beside if comparison else ""
    arena = "the parameters of the Long Range Arena" if all(each.is_lra for each, _ in found) else "other parameters"
    return (
        "# Accuracy without tracing a path\n\n"
        f"Generated with {arena}, not the released images. Accuracy in percent (chance: 50) of\n"
        "two rules, fitted by gradient boosting and tested on other images: one uses the distance of the markers, the\n"
        "other also the directions of the two dashes below them. Only accuracies above the second rule show tracing.\n"
        "In quarters of the marker distance:\n\n"
        f"{markdown(head, rows)}\n\n"
        f"{beside}{about()}\n"
    )


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
