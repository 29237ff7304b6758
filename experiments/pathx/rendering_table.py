"""The accuracy of a model on the same images in every rendering.

Drawn by the second renderer, plain_render.py, which no training uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.measurements import Measurement, slug
from experiments.pathfinder.parameters import parameters_of
from experiments.pathfinder.plain_render import plain_render
from experiments.pathfinder.rendering import RENDERINGS
from experiments.pathx.data.batches import Recipe, pack_images
from experiments.pathx.data.packing import Packed
from experiments.pathx.evaluate import Evaluation, accuracy_of, vectors_of
from experiments.pathx.scoring import standard_error
from experiments.training.atomic_files import write_json, write_text
from experiments.training.environment import device_name, versions
from experiments.training.fingerprint import sha256

Row = dict[str, Any]

HEAD = "| rendering | right | of | accuracy | said connected |"


def pack_rendered(recipe: Recipe, file: Path, name: str, first: int, last: int) -> Packed:
    vectors = vectors_of(file)
    images = [
        plain_render(vectors, index, RENDERINGS[name], np.random.default_rng(index)) for index in range(first, last)
    ]
    return pack_images(recipe, images, vectors.labels[first:last].tolist())


def table(
    evaluation: Evaluation,
    file: Path,
    images: int,
    names: Sequence[str] = tuple(RENDERINGS),
    report: Callable[[Row], None] = lambda row: None,
    progress: Callable[[int], None] = lambda images: None,
) -> dict[str, Any]:
    stage, config = evaluation.stage, evaluation.config
    rows: list[Row] = []
    for name in names:

        def counted(done: int, before: int = images * len(rows)) -> None:
            progress(before + done)

        found = evaluation.scores(pack_rendered, file, name, images=images, progress=counted)
        rows.append({
            "rendering": name, "images": images, "right": int(found.right.sum()), "accuracy": found.accuracy,
            "error": standard_error(found.accuracy, images),
            "said_connected": int((found.chances > 0.5).sum()), "connected": int(found.labels.sum()),
        })  # fmt: skip
        report(rows[-1])
    return {
        "parameters": parameters_of(stage.size, stage.contour).name,
        "background": stage.background,
        "floor": config.floor,
        "rows": rows,
        "worst_below_best": max(row["accuracy"] for row in rows) - min(row["accuracy"] for row in rows),
        "test_set_sha256": sha256(file),
        "precision": config.precision,
        "device": device_name(evaluation.device),
        "versions": versions(),
    }


def measurements_of(found: dict[str, Any], named: tuple[str, str, str]) -> list[Measurement]:
    return [accuracy_of(f"pathx/renderings/{slug(row['rendering'])}/{'-'.join(named)}", row) for row in found["rows"]]


def write(found: dict[str, Any], folder: Path) -> None:
    write_text(folder / "renderings.md", markdown(found))
    write_json(folder / "renderings.json", found)


def line(row: Row) -> str:
    return (
        f"| {row['rendering']} | {row['right']:,} | {row['images']:,} | {100 * row['accuracy']:.1f} ± "
        f"{100 * row['error']:.1f} % | {row['said_connected']:,}, {row['connected']:,} are |"
    )


def markdown(found: dict[str, Any]) -> str:
    text = [
        "# Renderings",
        "",
        f"The same {found['rows'][0]['images']:,} drawn images of {found['parameters']} in every rendering, by the "
        "second renderer (`experiments/pathfinder/plain_render.py`).",
        f"Background: {background(found)}. {spread(found)}.",
        "",
        HEAD,
        "|---|---|---|---|---|",
        *map(line, found["rows"]),
    ]
    return "\n".join(text) + "\n"


def spread(found: dict[str, Any]) -> str:
    return f"From best to worst: {100 * found['worst_below_best']:.1f} points"


def background(found: dict[str, Any]) -> str:
    if found["background"] == "keep":
        return "all pixels are tokens"
    return "black pixels left out" if found["floor"] == 1 else f"levels below {found['floor']} left out"
