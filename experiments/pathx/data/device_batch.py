from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.pathx.data.packing import LEVELS, Packed, TileList
from experiments.pathx.masks.grid_masks import grid_mask
from experiments.pathx.masks.orders import BASE
from experiments.pathx.masks.packed_masks import packed_mask
from experiments.pathx.masks.relations import Relation
from experiments.pathx.model.gather import inverse_permutation
from sparseflash import BlockMask


@dataclass(frozen=True)
class Order:
    order: Tensor  # int64 [N]: token t is stored token order[t]
    inverse: Tensor  # int64 [N]


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # int16 [B, N]; below 0: padding
    y: Tensor  # int16 [1, N]
    x: Tensor  # int16 [1, N]
    labels: Tensor  # int64 [I]; NO_LABEL without an image
    blocks: Tensor  # int64 [I, K]
    block: int
    side: int  # pixels
    orders: dict[str, Order]
    masks: tuple[BlockMask, ...]  # of each layer, in its order
    layer_orders: tuple[str, ...]
    pixel_labels: Tensor | None  # uint8 [B, N]
    tokens: int
    images: int

    @property
    def live(self) -> Tensor:
        return self.ids >= 0


def on_device(packed: Packed, layers: Sequence[Relation], device: torch.device, registers: int = 0) -> Batch:
    """The host does not wait for the device."""
    tensors = {name: moved(array, device) for name, array in arrays_of(packed).items()}
    return batch_of(tensors, layers, packed.block, registers, side=packed.side, tokens=packed.tokens,
                    images=packed.images)  # fmt: skip


def moved(array: NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def arrays_of(packed: Packed) -> dict[str, NDArray[np.generic]]:
    arrays: dict[str, NDArray[np.generic]] = {
        "ids": packed.ids, "y": packed.y, "x": packed.x, "blocks": packed.blocks.astype(np.int64),
        "labels": packed.labels.astype(np.int64),
    }  # fmt: skip
    arrays |= {f"order.{name}": order for name, order in packed.orders.items()}
    for name, tiles in packed.tiles.items():
        arrays |= {f"tiles.{name}.{field}": array for field, array in tiles._asdict().items()}
    if packed.pixel_labels is not None:
        arrays["pixel_labels"] = packed.pixel_labels
    return arrays


def batch_of(
    tensors: dict[str, Tensor],
    layers: Sequence[Relation],
    block: int,
    registers: int,
    *,
    side: int,
    tokens: int,
    images: int,
) -> Batch:
    """The tensors may be larger than the batch: images without blocks have the label `NO_LABEL`, and some tiles belong
    to no row.
    """
    ids, y, x = tensors["ids"], tensors["y"], tensors["x"]
    orders = {name.removeprefix("order."): order.long() for name, order in tensors.items() if name.startswith("order.")}
    of_relation: dict[str, BlockMask] = {}
    for relation in dict.fromkeys(layers):
        names = [f"tiles.{relation.name}.{field}" for field in TileList._fields]
        if names[0] not in tensors:
            of_relation[relation.name] = moved_grid_mask(relation, side, block, registers, ids.device)
            continue
        order = orders.get(relation.order)
        in_order = [each[0] if order is None else each[0][order] for each in (ids, y, x)]
        has_register = in_order[0] >= LEVELS if registers else None
        is_pixel = (in_order[0] >= 0) & (in_order[0] < LEVELS)
        of_relation[relation.name] = packed_mask(
            relation, *(tensors[name] for name in names), (in_order[1], in_order[2]), is_pixel, has_register, block
        )
    return Batch(
        ids, y, x, tensors["labels"], tensors["blocks"], block, side,
        {name: Order(order, inverse_permutation(order)) for name, order in orders.items()},
        tuple(of_relation[relation.name] for relation in layers),
        tuple(relation.order for relation in layers),
        tensors.get("pixel_labels"), tokens, images,
    )  # fmt: skip


@lru_cache(maxsize=32)
def moved_grid_mask(relation: Relation, side: int, block: int, registers: int, device: torch.device) -> BlockMask:
    return grid_mask(relation, side, block, registers).to(device)


def between(batch: Batch, now: str, then: str) -> Order:
    if now == BASE:
        return batch.orders[then]
    if then == BASE:
        return Order(batch.orders[now].inverse, batch.orders[now].order)
    one, other = batch.orders[now], batch.orders[then]
    return Order(one.inverse[other.order], other.inverse[one.order])
