"""A table of results beside published systems: accuracy, parameters, images and minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.pathfinder.cnn.results import STORED, stored
from experiments.pathfinder.parameters import lra
from experiments.pathx.supervision import described, of_model

HEAD = ["system", "Path-X", "Path-256", "parameters", "images seen at the task's size or below", "compute"]

NO_TRACING = "distance and end dashes"  # one of shortcuts.RULES, which is slow to import

# The papers' own figures, on the arena's files; sources in ../pathfinder/README.md and the papers named.
PUBLISHED: list[list[str]] = [
    ["FlashAttention (Dao et al., 2022)", "61.4 %", "-", "-", "64M to 96M", "not stated"],
    ["Block-sparse FlashAttention (Dao et al., 2022)", "56.0 %", "63.1 %", "-", "64M to 96M", "not stated"],
    ["Transformer, rotary, pretrained (Amos et al., 2024)", "93.0 % *", "-", "-", "up to 64M", "<= 5 days, 4 GPUs"],
    ["S4 (Gu et al., 2022, v2)", "96.4 %", "67.8 %", "-", "8M", "47 h, A100"],
    ["S4, self-pretrained (Amos et al., 2024)", "96.9 % *", "87.1 %", "-", "-", "-"],
    ["S4D-DFouT", "94.2 %", "87.9 %", "-", "-", "-"],
    ["MEGA (Ma et al., 2023)", "98.0 %", "-", "-", "16M", "8 A100s, 100 epochs"],
    ["S5 (Smith et al., 2023)", "98.6 %", "-", "-", "12M", "-"],
    ["ChordMixer (Khalitov et al., 2023)", "98.6 %", "-", "-", "-", "-"],
]  # fmt: skip


def found_below(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The models below a folder that have stored results: their names, and the contents of the file beside the weights.

    The weights themselves need not be there: a result stays in the table when its weights are no longer stored.
    """
    found = []
    for path in sorted(folder.rglob("*.json")):
        values = json.loads(path.read_text())
        if isinstance(values, dict) and "sha256" in values and values.get("results"):
            found.append((path.parent.name if path.stem == "model" else path.stem, values))
    return found


def with_error(found: dict[str, Any]) -> str:
    """An accuracy and its standard error.

    >>> with_error({"accuracy": 0.976, "error": 0.0011}), with_error({"accuracy": 0.9967, "error": 0.0004})
    ('97.6 ± 0.1 %', '99.67 ± 0.04 %')
    """
    digits = 1 if found["error"] >= 0.0005 else 2
    return f"{100 * found['accuracy']:.{digits}f} ± {100 * found['error']:.{digits}f} %"


def cnn_rows(folder: Path | None = None) -> list[list[str]]:
    """A row for each of the two tasks for which the result of a small 2-D CNN is stored."""
    found = []
    for place, size in enumerate((128, 256)):
        figure = stored(lra(size, 14).name, folder)
        if figure is not None:
            accuracies = ["-", "-"]
            accuracies[place] = with_error(figure)
            weights, images = (f"{count / 1e6:.2f}M" for count in (figure["weights"], figure["cost"]["images"]))
            minutes = figure["cost"]["seconds"] / 60
            compute = f"{minutes:.0f} min, {figure['device']}"
            found.append([f"{figure['rule']} (ours)", *accuracies, weights, images, compute])
    return found


def rule_row(page: Path = STORED / "shortcuts.md") -> list[str]:
    """The row of the better rule that traces nothing, as measured."""
    measured = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines()]
    accuracies = {cells[0]: cells[3] for cells in measured if len(cells) > 3 and cells[2] == NO_TRACING}
    return [f"no tracing: {NO_TRACING} (ours)", *(f"{accuracies[lra(size, 14).name]} %" for size in (128, 256)),
            "-", "-", "-"]  # fmt: skip


def rows(folders: list[Path], figures: Path | None = None) -> list[list[str]]:
    """Our results, with one row for each model and background; small 2-D CNNs, by default the stored ones; published
    results.
    """
    ours = []
    for folder in folders:
        for name, note in found_below(folder):
            for background in ("drop", "keep"):
                accuracies = {}
                for key, found in note["results"].items():
                    size, contour, kind = key.split("-")
                    if kind == background and contour == "14":
                        accuracies[size] = with_error(found)
                if not accuracies:
                    continue
                how = "background dropped" if background == "drop" else "all pixels live"
                supervision = described(of_model(note))
                supervision = f", {supervision}" if supervision else ""
                cost = note["cost"]
                ours.append([
                    f"ours: {name}, {how}{supervision}", accuracies.get("128", "-"), accuracies.get("256", "-"),
                    f"{note['parameters'] / 1e6:.2f}M", f"{cost['images'] / 1e6:.2f}M",
                    f"{cost['minutes']:.0f} min, {note['device']}",
                ])  # fmt: skip
    return [HEAD, *ours, *cnn_rows(figures), rule_row(), *PUBLISHED]


def markdown(lines: list[list[str]]) -> str:
    """The table, after what a reader must know about it."""
    text = [
        "# Path-X and Path-256",
        "",
        "Ours: LRA-parameter generated Path-X and Path-256, 20,000 test images from seeds of their own, fresh images",
        "in training; curriculum over sizes and contour lengths, all of whose images and minutes are counted.",
        "Published figures are of the arena's files. Images and compute of others as far as their papers say.",
        "* as quoted by others; not read in the paper itself.",
        "",
        "| " + " | ".join(lines[0]) + " |",
        "|" + "---|" * len(lines[0]),
        *("| " + " | ".join(line) + " |" for line in lines[1:]),
    ]
    return "\n".join(text) + "\n"
