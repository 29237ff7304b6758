"""A batch on the device, with the mask of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.pathx.grid_masks import grid_mask
from experiments.pathx.orders import BASE
from experiments.pathx.packed_masks import packed_mask
from experiments.pathx.packing import LEVELS, Packed
from experiments.pathx.relations import Relation
from sparseflash import BlockMask

Key = TypeVar("Key")


@dataclass(frozen=True)
class Order:
    """An order of the tokens beside the one that they are stored in."""

    order: Tensor  # int64 [N]: token t of it is token order[t] of the stored ones
    inverse: Tensor  # int64 [N]: where each stored token is in it


@dataclass(frozen=True)
class Batch:
    """See packing.Packed; here with I images as tensors of one device."""

    ids: Tensor  # int16 [B, N]; below 0: padding
    y: Tensor  # int16 [1, N]
    x: Tensor  # int16 [1, N]
    labels: Tensor  # int64 [I]
    blocks: Tensor  # int64 [I, K]
    block: int
    orders: dict[str, Order]
    masks: tuple[BlockMask, ...]  # one a layer, each in its layer's order
    layer_orders: tuple[str, ...]
    traced: Tensor | None  # uint8 [B, N]
    tokens: int
    images: int

    @property
    def live(self) -> Tensor:
        """Which tokens are none of the padding: bool [B, N]."""
        return self.ids >= 0


def on_device(packed: Packed, layers: Sequence[Relation], device: torch.device, registers: int = 0) -> Batch:
    """The batch of a packing, and its masks. Nothing waits for the device."""

    def there(array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    ids, y, x = there(packed.ids), there(packed.y), there(packed.x)
    orders = {name: there(order).long() for name, order in packed.orders.items()}
    of_relation: dict[str, BlockMask] = {}
    side = round((ids.shape[1] - (packed.block if registers else 0)) ** 0.5)
    for relation in dict.fromkeys(layers):
        if not packed.tiles:
            of_relation[relation.name] = moved_grid_mask(relation, side, packed.block, registers, device)
            continue
        order = orders.get(relation.order)
        in_order = [each[0] if order is None else each[0][order] for each in (ids, y, x)]
        has_register = in_order[0] >= LEVELS if registers else None
        is_pixel = (in_order[0] >= 0) & (in_order[0] < LEVELS)
        arrays = [there(array) for array in packed.tiles[relation.name]]
        of_relation[relation.name] = packed_mask(
            relation, *arrays, (in_order[1], in_order[2]), is_pixel, has_register, packed.block
        )
    return Batch(
        ids, y, x, there(packed.labels).long(), there(packed.blocks).long(), packed.block,
        {name: Order(order, inverse_of(order)) for name, order in orders.items()},
        tuple(of_relation[relation.name] for relation in layers),
        tuple(relation.order for relation in layers),
        None if packed.traced is None else there(packed.traced),
        packed.tokens, packed.images,
    )  # fmt: skip


_GRID_MASKS: dict[tuple[Relation, int, int, int, torch.device], BlockMask] = {}


def moved_grid_mask(relation: Relation, side: int, block: int, registers: int, device: torch.device) -> BlockMask:
    """The mask on the device, made once: so its plan, too, is."""
    key = (relation, side, block, registers, device)
    if key not in _GRID_MASKS:
        _GRID_MASKS[key] = grid_mask(relation, side, block, registers).to(device)
    return _GRID_MASKS[key]


def inverse_of(order: Tensor) -> Tensor:
    """The permutation that undoes another, int64 [N]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Moved(torch.autograd.Function):
    """x[:, order], whose gradient is gathered, too: scattering it would add in no fixed order."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """x: [B, N, W]"""
        return x.index_select(1, order)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.inverse = inputs[2]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(1, ctx.inverse), None, None  # type: ignore[attr-defined]


def between(batch: Batch, now: str, then: str) -> Order:
    """How tokens in one order become tokens in another."""
    if now == BASE:
        return batch.orders[then]
    if then == BASE:
        return Order(batch.orders[now].inverse, batch.orders[now].order)
    one, other = batch.orders[now], batch.orders[then]
    return Order(one.inverse[other.order], other.inverse[one.order])
