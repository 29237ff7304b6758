from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table

from experiments.pathx import weights
from experiments.pathx.config import Config, Stage
from experiments.pathx.data.batches import make, recipe_of
from experiments.pathx.data.device_batch import on_device
from experiments.pathx.data.packing import Packed
from experiments.pathx.graph_steps import steps_of
from experiments.training.clock import synchronize
from experiments.training.environment import device_name
from experiments.training.optimizer import adamw
from experiments.training.profiling import costs_of

BATCHES = 2  # consecutive steps have different masks


@dataclass(frozen=True)
class Case:
    size: int
    contour: int
    layers: str
    background: str = "drop"


def measured(
    case: Case, config: Config, tokens: int, device: torch.device, seconds: float, *, profiled: bool = False
) -> dict[str, Any]:
    """In the result, masks_ms completes the masks on the device, part of step_ms but for CUDA graphs; tiles is the
    share of live tiles.
    """
    stage = Stage(size=case.size, contour=case.contour, tokens=tokens, lr=1e-3, steps=1, background=case.background)
    config = replace(config, curriculum=(replace(stage, layers=case.layers),), layers=case.layers)
    recipe = recipe_of(config, 0)
    made = time.perf_counter()
    batches = [make(recipe, step) for step in range(BATCHES)]
    made = (time.perf_counter() - made) / sum(batch.images for batch in batches)
    model = weights.for_training(config, device)
    optimizer = adamw(model, stage.lr, 0.0)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    training = steps_of(model, optimizer, recipe, config, device)
    training.prepare(batches[0])

    def step(number: int) -> Packed:
        packed = batches[number % BATCHES]
        training(packed, 1e-3)
        return packed

    def steps(until: float, least: int) -> Iterator[Packed]:
        number = 0
        while number < least or time.perf_counter() < until:
            packed = step(number)
            if number % 4 == 3:
                synchronize(device)
            number += 1
            yield packed

    for _ in steps(0.0, 2):
        pass
    synchronize(device)
    begun = time.perf_counter()
    done = list(steps(begun + seconds, 2))
    synchronize(device)
    each = (time.perf_counter() - begun) / len(done)
    begun = time.perf_counter()
    for packed in done[:4]:
        on_device(packed, recipe.layers, device, config.registers)
    synchronize(device)
    masks = (time.perf_counter() - begun) / len(done[:4])
    costs = costs_of(step, 4, device) if profiled else []
    images = sum(packed.images for packed in done) / len(done)
    live = sum(packed.tokens for packed in done) / len(done)
    return {
        "size": case.size,
        "contour": case.contour,
        "background": case.background,
        "layers": case.layers,
        "step_ms": 1000 * each,
        "masks_ms": 1000 * masks,
        "tokens_per_s": live / each,
        "images_per_s": images / each,
        "images_a_step": images,
        "live": live / batches[0].ids.size,
        "tiles": tile_share(batches[0], config, recipe.layers),
        "generator_ms_an_image": 1000 * made,
        "memory_gb": torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None,
        "device": device_name(device),
        **({"costs": [cost._asdict() for cost in costs]} if profiled else {}),
    }


def tile_share(packed: Packed, config: Config, layers: tuple[Any, ...]) -> float:
    blocks = (packed.blocks < packed.ids.size // packed.block).sum(1)
    if packed.tiles:
        return float(sum(len(packed.tiles[each.name].indices) for each in layers) / len(layers) / (blocks**2).sum())
    batch = on_device(packed, layers, torch.device("cpu"), config.registers)
    return float(sum(len(mask.indices) for mask in batch.masks) / len(layers) / blocks[0] ** 2)


def table(found: list[dict[str, Any]], tokens: int) -> Table:
    show = Table(title=f"{tokens:,} tokens a step, {found[0]['device'] if found else ''}")
    for column in ("px", "layers", "step ms", "masks ms", "tokens/s", "images/s", "tiles", "GB"):
        show.add_column(column, justify="left" if column == "layers" else "right")
    for each in found:
        memory = "-" if each["memory_gb"] is None else f"{each['memory_gb']:.1f}"
        show.add_row(
            str(each["size"]), each["layers"], f"{each['step_ms']:.1f}", f"{each['masks_ms']:.1f}",
            f"{each['tokens_per_s']:,.0f}", f"{each['images_per_s']:,.0f}", f"{100 * each['tiles']:.1f} %", memory,
        )  # fmt: skip
    return show
