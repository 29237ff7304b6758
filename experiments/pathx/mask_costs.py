from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.pathx.data.device_batch import Batch
from experiments.pathx.masks.orders import BASE
from experiments.pathx.masks.relations import Relation
from sparseflash import BlockMask
from sparseflash.analysis import density, layers_to_full_reach, reach


def in_base_order(batch: Batch, layer: int) -> BlockMask:
    mask, order = batch.masks[layer].canonical(), batch.layer_orders[layer]
    if order != BASE:
        mask = mask.permute(batch.orders[order].inverse)
    last = int(batch.live[0].nonzero().max()) + 1
    return mask.crop(q=(0, last), k=(0, last))


def costs(batch: Batch, layers: Sequence[Relation]) -> list[dict[str, Any]]:
    """For each layer density (live scores), tiles (computed scores), reached (pairs where one token influences the
    other after this layer) and layers_alone (layers with only this mask after which every token reaches every other, or
    None).
    """
    if batch.images != 1:
        raise ValueError(f"the batch must be of one image; got {batch.images}")
    masks = [in_base_order(batch, layer) for layer in range(len(layers))]
    found = []
    alone: dict[str, int | None] = {}
    for number, relation in enumerate(layers):
        if relation.name not in alone:
            alone[relation.name] = layers_to_full_reach(masks[number])
        found.append({
            "layer": number,
            "mask": relation.name,
            "order": relation.order,
            "density": density(masks[number]).score_share,
            "tiles": density(batch.masks[number].canonical()).tile_share,
            "reached": reach(masks[: number + 1]).density,
            "layers_alone": alone[relation.name],
        })  # fmt: skip
    return found
