"""The accuracy of a model on the same drawn images in every rendering; see experiments/pathfinder/rendering.py.

The images come from the second renderer, plain_render.py, which no training uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.pathfinder.parameters import parameters_of
from experiments.pathfinder.plain_render import plain_render
from experiments.pathfinder.rendering import RENDERINGS
from experiments.pathx.config import Config, Stage
from experiments.pathx.data.batches import Recipe, batches_of, pack_images
from experiments.pathx.data.packing import Packed
from experiments.pathx.data.stream import Stream
from experiments.pathx.evaluate import recipe_for, vectors_of
from experiments.pathx.scoring import Scores, score, standard_error
from experiments.training.atomic_files import write_json, write_text
from experiments.training.environment import device_name, versions
from experiments.training.fingerprint import sha256

Row = dict[str, Any]

HEAD = "| rendering | right | of | accuracy | said connected |"


def pack_rendered(recipe: Recipe, file: Path, first: int, last: int, name: str) -> Packed:
    """Images first .. last - 1 of a file in the rendering with this name. Noise depends on the image's number alone."""
    vectors = vectors_of(file)
    images = [
        plain_render(vectors, index, RENDERINGS[name], np.random.default_rng(index)) for index in range(first, last)
    ]
    return pack_images(recipe, images, vectors.labels[first:last].tolist())


def scores_in(
    model: nn.Module,
    config: Config,
    stage: Stage,
    file: Path,
    images: int,
    stream: Stream,
    device: torch.device,
    name: str,
    progress: Callable[[int], None] = lambda images: None,
) -> Scores:
    """The scores of a model on the first images of a file in a rendering; progress as in `scores_on`."""
    recipe = recipe_for(config, stage)
    calls = ((recipe, file, first, last, name) for first, last in batches_of(recipe, images))
    return score(model, stream.in_order(pack_rendered, calls), recipe.layers, config, device, progress)


def table(
    model: nn.Module,
    config: Config,
    stage: Stage,
    file: Path,
    images: int,
    stream: Stream,
    device: torch.device,
    names: Sequence[str] = tuple(RENDERINGS),
    report: Callable[[Row], None] = lambda row: None,
    progress: Callable[[int], None] = lambda images: None,
) -> dict[str, Any]:
    """A row for each rendering, with what is needed to judge and repeat them.

    report: called with every row as soon as it is known. progress: with the number of images that are answered, of all
        renderings together.
    """
    model.to(device)
    rows: list[Row] = []
    for name in names:

        def counted(done: int, before: int = images * len(rows)) -> None:
            progress(before + done)

        found = scores_in(model, config, stage, file, images, stream, device, name, counted)
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
        "device": device_name(device),
        "versions": versions(),
    }


def write(found: dict[str, Any], folder: Path) -> None:
    """Writes the table to a folder, as a page and as JSON."""
    write_text(folder / "renderings.md", markdown(found))
    write_json(folder / "renderings.json", found)


def line(row: Row) -> str:
    """A row of the table."""
    return (
        f"| {row['rendering']} | {row['right']:,} | {row['images']:,} | {100 * row['accuracy']:.1f} ± "
        f"{100 * row['error']:.1f} % | {row['said_connected']:,}, {row['connected']:,} are |"
    )


def markdown(found: dict[str, Any]) -> str:
    """The table as a page."""
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
    """How far the renderings lie apart, in words."""
    return f"From best to worst: {100 * found['worst_below_best']:.1f} points"


def background(found: dict[str, Any]) -> str:
    """What becomes of the background, in words."""
    if found["background"] == "keep":
        return "all pixels are tokens"
    return "black pixels left out" if found["floor"] == 1 else f"levels below {found['floor']} left out"
