"""A table of results beside published systems."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.pathfinder.cnn.results import STORED
from experiments.pathfinder.parameters import parameters_of
from experiments.pathx.masks.relations import parse_layers
from experiments.pathx.supervision import described, of_model
from experiments.training.reading import reading

HEAD = [
    "system", "Path-X", "Path-256", "Path-512", "labels", "background", "positions", "order", "layers", "images",
    "parameters", "images seen at the task's size or below", "compute",
]  # fmt: skip

SIZES = (128, 256, 512)

NO_TRACING = "distance and end dashes"  # one of shortcuts.RULES

# The method, then training data: the class of an image, all pixels, in rows, of 160,000 files.
_PLAIN = ["-", "class", "kept"]

# Figures of the papers, on the arena's files; sources in ../pathfinder/README.md.
PUBLISHED: list[list[str]] = [
    ["FlashAttention (Dao et al., 2022)", "61.4 %", "-", *_PLAIN, "learned, from Path-64's", "rows", "dense",
     "160,000 files", "-", "64M to 96M", "not stated"],
    ["Block-sparse FlashAttention (Dao et al., 2022)", "56.0 %", "63.1 %", *_PLAIN, "learned, from Path-64's", "rows",
     "butterfly", "160,000 files", "-", "64M to 96M", "not stated"],
    ["Transformer, rotary, pretrained (Amos et al., 2024)", "93.0 % *", "-", *_PLAIN, "1-D rotary", "rows",
     "local, 3 chunks of 4,096", "160,000 files", "-", "up to 64M", "<= 5 days, 4 GPUs"],
    ["S4 (Gu et al., 2022, v2)", "96.4 %", "67.8 %", *_PLAIN, "none", "rows", "state space", "160,000 files", "-", "8M",
     "47 h, A100"],
    ["S4, self-pretrained (Amos et al., 2024)", "96.9 % *", "87.1 %", *_PLAIN, "none", "rows", "state space",
     "160,000 files", "-", "-", "-"],
    ["S4D-DFouT", "94.2 %", "87.9 %", *_PLAIN, "none", "rows", "state space", "160,000 files", "-", "-", "-"],
    ["MEGA (Ma et al., 2023)", "98.0 %", "-", *_PLAIN, "-", "rows", "gated attention, moving average", "160,000 files",
     "-", "16M", "8 A100s, 100 epochs"],
    ["S5 (Smith et al., 2023)", "98.6 %", "-", *_PLAIN, "none", "rows", "state space", "160,000 files", "-", "12M",
     "-"],
    ["ChordMixer (Khalitov et al., 2023)", "98.6 %", "-", *_PLAIN, "-", "rows", "chord mixing", "160,000 files", "-",
     "-", "-"],
]  # fmt: skip


def found_below(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The names and notes of runs with results. Stored weights name their run; `shipped` is the folder of weights."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        with reading(path, "JSON, as all such files where models lie"):
            values = json.loads(path.read_text())
        if isinstance(values, dict) and "sha256" in values and values.get("results"):
            name = path.parent.name if path.stem == "model" else path.stem
            shipped = {"shipped": path.parent.name} if "run" in values else {}
            found.append((values.get("run", name), {**values, **shipped}))
    return sorted(found, key=lambda each: each[0])


def with_error(found: dict[str, Any]) -> str:
    digits = 1 if found["error"] >= 0.0005 else 2
    return f"{100 * found['accuracy']:.{digits}f} ± {100 * found['error']:.{digits}f} %"


def rule_row(pages: Sequence[Path] = (STORED / "shortcuts.md", STORED / "shortcuts-512.md")) -> list[str]:
    lines = [line for page in pages for line in page.read_text().splitlines()]
    measured = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    accuracies = {cells[0]: cells[3] for cells in measured if len(cells) > 3 and cells[2] == NO_TRACING}
    return [f"no tracing: {NO_TRACING} (ours)", *(f"{accuracies[parameters_of(size, 14).name]} %" for size in SIZES),
            *"-" * 9]  # fmt: skip


def rows(folders: list[Path]) -> list[list[str]]:
    ours = []
    for folder in folders:
        for name, note in found_below(folder):
            for background in ("drop", "keep"):
                tested = {}
                for key, found in note["results"].items():
                    size, contour, kind = key.split("-")
                    if kind == background and contour == "14":
                        tested[size] = found
                if tested:
                    ours.append((of_model(note)["labels"] != 0.0, name, row_of(name, note, background, tested)))
    ours.sort(key=lambda each: each[:2])
    return [HEAD, *(row for *_, row in ours), rule_row(), *PUBLISHED]


def row_of(name: str, note: dict[str, Any], background: str, tested: dict[str, dict[str, Any]]) -> list[str]:
    accuracies = {size: with_error(found) for size, found in tested.items()}
    found, cost = next(iter(tested.values())), note["cost"]
    supervision = described(of_model(note))
    floor, renderings = found.get("floor", 1), found.get("renderings", "one")
    images = found.get("training_images", "fresh")
    left_out = "black left out" if floor == 1 else f"levels below {floor} left out"
    if found.get("model", "attention") == "unet":
        left_out = "kept" if floor == 1 else f"levels below {floor} black"
        attention = ["-", "-", "U-Net, convolutions"]
    else:
        positions = {"plane": "2-D rotary", "line": "1-D rotary"}[found.get("positions", "plane")]
        attention = [positions, orders(found["layers"]), found["layers"]]
    return [
        f"ours: {name}" if "shipped" not in note else f"ours: [{name}](../../weights/{note['shipped']})",
        *(accuracies.get(str(size), "-") for size in SIZES),
        f"class, {supervision}" if supervision else "class",
        left_out if background == "drop" else "kept",
        *attention,
        f"{images}, {renderings} rendering" + ("s" if renderings == "drawn" else ""),
        f"{note['parameters'] / 1e6:.2f}M", f"{cost['images'] / 1e6:.2f}M",
        f"{cost['minutes']:.0f} min, {note['device']}",
    ]  # fmt: skip


def orders(layers: str) -> str:
    names = {"hilbert": "Hilbert"}
    return ", ".join(dict.fromkeys(names.get(each.order, each.order) for each in parse_layers(layers)))


def markdown(lines: list[list[str]]) -> str:
    text = [
        "# Path-X, Path-256 and Path-512",
        "",
        "Ours: LRA-parameter generated Path-X and Path-256, and Path-512 with extrapolated parameters, which no other",
        "system has used. 20,000 test images with separate seeds. Images and minutes count all stages of the",
        "curriculum. The columns from labels to images state the help that each system had. `class`: the answer only.",
        "`pixel labels`: the number of markers on each pixel's curve. `kept`: all pixels are tokens. Our rows without",
        "pixel labels come first. Published figures are on the arena's files, with the columns that the papers state.",
        "\\* quoted by others, not read in the paper. A link leads to the weights.",
        "",
        "| " + " | ".join(lines[0]) + " |",
        "|" + "---|" * len(lines[0]),
        *("| " + " | ".join(line).replace("*", r"\*") + " |" for line in lines[1:]),  # two would be emphasis
    ]
    return "\n".join(text) + "\n"
