"""Analyses a trained model: accuracy by group, attention, cost and reach of its masks.

<out>/analysis.json     all figures
<out>/analysis.md       the same as tables
<out>/attention-*.png   attention maps of examples that the model solves
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.pathfinder.bins import by_distance
from experiments.pathfinder.cnn.results import as_rule, stored
from experiments.pathfinder.render import render
from experiments.pathfinder.vectors import Vectors
from experiments.pathx import attention_maps
from experiments.pathx.config import Config, Stage
from experiments.pathx.data.batches import pack_vectors
from experiments.pathx.data.device_batch import on_device
from experiments.pathx.data.stream import Stream
from experiments.pathx.evaluate import Evaluation, pack_from_file, recipe_for, vectors_of
from experiments.pathx.mask_costs import costs
from experiments.pathx.model.classifier import PathModel
from experiments.pathx.weights import Model
from experiments.training.atomic_files import write_json, write_text


def analyse(
    model: Model,
    config: Config,
    stages: list[Stage],
    file_of: Callable[[Stage], Path],
    images: int,
    examples: int,
    out: Path,
    stream: Stream,
    device: torch.device,
) -> dict[str, Any]:
    if examples and not isinstance(model, PathModel):
        raise ValueError("a U-Net has no attention maps; pass --examples 0")
    out.mkdir(parents=True, exist_ok=True)
    folds = []
    for stage in stages:
        file = file_of(stage)
        vectors = vectors_of(file)
        evaluation = Evaluation(model, config, stage, stream, device)
        found = evaluation.scores(pack_from_file, file, images=images)
        right = found.right.numpy()
        cnn = stored(vectors.parameters.name)
        folds.append(
            evaluation.result(found, file)
            | {"by_distance": by_distance(vectors, right), "cnn": None if cnn is None else as_rule(cnn)}
        )
    last, vectors = stages[-1], vectors_of(file_of(stages[-1]))
    solved = [index for index in range(images) if right[index]]
    connected = [index for index in solved if vectors.labels[index]]
    apart = [index for index in solved if not vectors.labels[index]]
    if isinstance(model, PathModel):
        for index in (*connected[: -(-examples // 2)], *apart[: examples // 2]):
            draw_map(model, config, last, vectors, index, out, device)
    recipe = recipe_for(config, replace(last, background="drop"))
    one = on_device(pack_vectors(recipe, vectors, 0, 1), recipe.layers, torch.device("cpu"), config.registers)
    found_all = {"folds": folds, "masks": costs(one, recipe.layers)}
    write_json(out / "analysis.json", found_all)
    write_text(out / "analysis.md", markdown(found_all))
    return found_all


def draw_map(
    model: PathModel, config: Config, stage: Stage, vectors: Vectors, index: int, out: Path, device: torch.device
) -> None:
    recipe = recipe_for(config, replace(stage, background="drop"))
    batch = on_device(pack_vectors(recipe, vectors, index, index + 1), recipe.layers, device, config.registers)
    tokens = attention_maps.marker_tokens(batch, vectors.markers[index])
    weights = attention_maps.attention_from(model, batch, tokens)
    answer = "connected" if vectors.labels[index] else "not connected"
    attention_maps.draw(
        render(vectors, index, index + 1)[0], batch, weights, [relation.name for relation in recipe.layers],
        f"{stage.name}, test image {index}, {answer}: attention from the markers, mean over heads",
        out / f"attention-{stage.size}-{stage.contour}-{index}.png",
    )  # fmt: skip


def markdown(found: dict[str, Any]) -> str:
    lines = ["# Analysis", "", "Accuracy, and by quarters of the markers' distance, near to far.", ""]
    lines += ["| task | images | accuracy | quarters | borders (px) |", "|---|---|---|---|---|"]
    for fold in found["folds"]:
        quarters = fold["by_distance"]
        borders = ", ".join(f"{border:.0f}" for border in quarters["borders_px"])
        lines.append(
            f"| {fold['task']}, {fold['background']} | {fold['images']} | {percent(fold['accuracy'])} ± "
            f"{100 * fold['error']:.1f} | {', '.join(map(percent, quarters['accuracy']))} | {borders} |"
        )
        others = [rule | {"rule": f"no tracing: {rule['rule']}"} for rule in quarters["rules"]]
        others += [] if fold["cnn"] is None else [fold["cnn"]]
        for each in others:
            lines.append(
                f"| {each['rule']} | | {percent(each['accuracy'])} ± {100 * each['error']:.1f} | "
                f"{', '.join(map(percent, each['by_distance']))} | |"
            )
    if not found["masks"]:
        return "\n".join(lines) + "\n"
    lines += [
        "",
        "Masks on the first image, background dropped. Tiles: the computed part of dense attention; the last tile is "
        "padded.",
        "",
    ]
    lines += ["| layer | mask | order | live scores | tiles | reached so far | alone reaches all after |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for each in found["masks"]:
        alone = "never" if each["layers_alone"] is None else f"{each['layers_alone']} layers"
        lines.append(
            f"| {each['layer']} | {each['mask']} | {each['order']} | {percent(each['density'])} | "
            f"{percent(each['tiles'])} | {percent(each['reached'])} | {alone} |"
        )
    return "\n".join(lines) + "\n"


def percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f} %"
