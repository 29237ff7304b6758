"""Accuracy on Path-X over the images that a model has seen, every stored run from class labels.

Lines: held-out images while the last stage trains; dots: 20,000 test images. Images of shorter paths and smaller sizes
count, because the models learned from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.pathx.table import found_below
from experiments.training.reading import reading

# What a run's name says: one colour each, and all seeds are drawn.
KINDS = {
    "label-free-tiles16x5-butterfly8x4": ("block-sparse transformer", "tab:blue"),
    "label-free-dense9": ("dense transformer", "tab:orange"),
    "label-free-unet": ("U-Net", "tab:green"),
    "label-free-160000-tiles16x5-butterfly8x4": (
        "block-sparse transformer, 160,000 images of each length a stage",
        "tab:purple",
    ),
}
SIZE, CONTOUR = 128, 14


@dataclass(frozen=True)
class Curve:
    name: str
    kind: str  # of KINDS
    images: tuple[float, ...]  # seen at each validation of the last stage
    accuracy: tuple[float, ...]
    seen: int  # in all
    tested: float | None  # the final accuracy on the test set


def kind_of(name: str) -> str | None:
    """The kind of a run from its name, whatever its seed; None for others.

    >>> kind_of("label-free-unet-seed1"), kind_of("label-free-tiles16x5-butterfly8x4"), kind_of("path512-all")
    ('label-free-unet', 'label-free-tiles16x5-butterfly8x4', None)
    """
    return next((kind for kind in KINDS if name == kind or name.startswith(f"{kind}-seed")), None)


def curves(folder: Path, *others: Path) -> list[Curve]:
    """The curves of a folder's runs. others: more folders with results of these runs."""
    path = folder / "curves.jsonl"
    notes = {name: note for place in (folder, *others) for name, note in found_below(place)}
    with reading(path, "the curves of stored runs"):
        found = [json.loads(line) for line in path.read_text().splitlines()]
    made = [curve(each, kind, notes.get(each["name"], {})) for each in found if (kind := kind_of(each["name"]))]
    return sorted(made, key=lambda each: (list(KINDS).index(each.kind), each.name))


def curve(run: Mapping[str, Any], kind: str, note: Mapping[str, Any]) -> Curve:
    train, val = (columns(run["curve"][part]) for part in ("train", "val"))
    last = len(run["curriculum"]) - 1
    of_last = val["stage"] == last
    images = np.interp(val["step"][of_last], train["step"], train["images"])  # validations do not say how many
    result = note.get("results", {}).get(f"{SIZE}-{CONTOUR}-drop")
    return Curve(
        run["name"], kind, tuple(images.tolist()), tuple(val["accuracy"][of_last].tolist()),
        int(train["images"][-1]), None if result is None else result["accuracy"],
    )  # fmt: skip


def columns(table: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return dict(zip(table["columns"], np.array(table["rows"], float).T, strict=True))


def plot(found: Sequence[Curve], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for each in found:
        label, color = KINDS[each.kind]
        millions = [images / 1e6 for images in each.images]
        axes.plot(millions, [100 * (1 - accuracy) for accuracy in each.accuracy], color=color, lw=0.9, alpha=0.7)
        if each.tested is not None:
            axes.plot([each.seen / 1e6], [100 * (1 - each.tested)], "o", color=color, ms=5)
    for kind in dict.fromkeys(each.kind for each in found):
        label, color = KINDS[kind]
        runs = sum(each.kind == kind for each in found)
        axes.plot([], [], "o-", color=color, label=f"{label} ({runs} run{'s' if runs > 1 else ''})")
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 5, 10], ["99 %", "98 %", "95 %", "90 %"])
    axes.minorticks_off()
    axes.invert_yaxis()  # better above
    axes.set_xlim(left=0)
    axes.set_xlabel("million images seen, of all sizes and path lengths")
    axes.set_ylabel("accuracy on Path-X")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
