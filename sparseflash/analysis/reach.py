"""Which keys can influence a query through several layers, and the number of layers until all keys can."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice

import torch

from sparseflash.analysis import bitrows
from sparseflash.analysis.composition import TooManyTiles, compose
from sparseflash.analysis.layers import Element, Masks, block_of, check_size, checked, elements
from sparseflash.analysis.relation import Relation, tiles_of
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import flag, integer
from sparseflash.blockmask.build import Part

MOST_TILES = 1 << 24


def reach(masks: Masks, layers: int | None = None) -> BlockMask:
    """The keys that can influence a query after `layers` layers of attention with residual connections.

    >>> step = BlockMask.from_function(lambda q, k: (q - k).abs() <= 1, 64, block=16)
    >>> reach(step, 3) == BlockMask.from_function(lambda q, k: (q - k).abs() <= 3, 64, block=16)
    True

    Args:
        masks: one mask for every layer, or one per layer, first layer first; a list that is shorter than `layers` is
            repeated.
        layers: the number of layers, by default one for each given mask. 0 layers give the identity.

    With `M_l` the mask of layer l as a boolean matrix, the union of its heads, and `I` for the residual connection, the
    result is the boolean product

        R = (M_L or I) (M_(L-1) or I) ... (M_1 or I)

    so `R[q, k]` says whether input token k can change token q after the last layer.

    The result has one head, square blocks of the masks' smallest `block_q` or `block_k`, a pattern for each batch
    element if these differ, and no `lengths`.

    Raises ValueError for `q_len != k_len`, masks of different lengths or batch sizes, over 32,768 block rows, and if
    the result or the number of tiles to multiply would exceed 16.7 million: use larger blocks then.
    """
    every = checked(masks)
    check_size(every)
    layers = len(every) if layers is None else integer(layers, "layers", "layers")
    if layers < 0:
        raise ValueError(f"layers must not be negative; got {layers}.")
    found: dict[Element, Part] = {}
    block, length, of_batch = block_of(every), every[0].q_len, elements(every)
    for element in dict.fromkeys(of_batch):
        relation = _after(element, layers)
        count = bitrows.count(relation.full, relation.count) + len(relation.key)
        if count > MOST_TILES:
            raise TooManyTiles(
                f"the result must have at most {MOST_TILES} tiles; got {count} tiles of {block} x {block}. Pass "
                "masks with larger blocks; layers_to_full_reach and diameter build no such result."
            )
        found[element] = tiles_of(relation, element.stop)
    numbers = torch.arange(len(of_batch), device="cpu").view(-1, 1)
    return BlockMask._of(length, length, block, block, [found[each] for each in of_batch], numbers)


def layers_to_full_reach(masks: Masks, *, causal: bool = False) -> int | None:
    """The least number of layers after which every key can influence every query; None if that never happens.

    >>> import torch
    >>> i, j = torch.arange(8)[:, None], torch.arange(8)
    >>> butterfly = sum((i ^ j) == stride for stride in (0, 1, 2, 4)).bool()
    >>> layers_to_full_reach(BlockMask.from_layout(butterfly))
    3
    >>> layers_to_full_reach(BlockMask.from_layout(butterfly.tril()), causal=True) is None  # never, at any depth
    True

    `masks` as in `reach`; a list is repeated. `causal=True` requires only the keys up to the query's own position. The
    result is the largest over batch elements. Raises ValueError as `reach` does, except for large results.
    """
    goal = Relation.is_causally_everything if flag(causal, "causal") else Relation.is_everything

    def needed(element: Element) -> int | None:
        last, powers = _powers(element, goal)
        return _first(element, powers, goal) if goal(last) else None

    return _most(masks, needed)


def diameter(masks: Masks) -> int:
    """The number of layers after which nothing more is reached.

    >>> import torch
    >>> i, j = torch.arange(8)[:, None], torch.arange(8)
    >>> butterfly = sum((i ^ j) == stride for stride in (0, 1, 2, 4)).bool()
    >>> diameter(BlockMask.from_layout(butterfly.tril()))
    3

    If every key eventually influences every query, it equals `layers_to_full_reach`. `masks` as there.
    """

    def needed(element: Element) -> int:
        last, powers = _powers(element, lambda relation: False)
        return _first(element, powers, last.__eq__)

    return _most(masks, needed) or 0


def _after(element: Element, layers: int) -> Relation:
    steps = element.steps()
    if len(steps) == 1:
        return _power(steps[0], layers) if layers else element.nothing()
    result = element.nothing()
    for step in islice(cycle(steps), layers):
        result = compose(step, result)
    return result


def _power(step: Relation, exponent: int) -> Relation:
    result = step
    for bit in bin(exponent)[3:]:
        squared = compose(result, result)
        following = compose(step, squared) if bit == "1" else squared
        if following == result:
            return result
        result = following
    return result


def _powers(element: Element, goal: Callable[[Relation], bool]) -> tuple[Relation, list[Relation]]:
    """`T, T^2, T^4, ...` of the whole list of layers T, up to the first that meets the goal or changes nothing. A goal
    that a relation meets must be met by all larger relations.
    """
    power, *others = element.steps()
    for step in others:
        power = compose(step, power)
    powers: list[Relation] = []
    while not goal(power):
        squared = compose(power, power)
        if squared == power:
            break
        powers.append(power)
        power = squared
    return power, powers


def _first(element: Element, powers: list[Relation], goal: Callable[[Relation], bool]) -> int:
    steps = element.steps()
    if powers:
        # Reach only grows with layers. Find the most rounds of all layers that miss the goal, bit by bit, ...
        result, rounds = powers[-1], 1 << (len(powers) - 1)
        for exponent in reversed(range(len(powers) - 1)):
            longer = compose(powers[exponent], result)
            if not goal(longer):
                result, rounds = longer, rounds + (1 << exponent)
    else:
        result, rounds = element.nothing(), 0
        if goal(result):
            return 0
    # ... then the number of layers within the round that meets it, at the latest the last.
    for layer, step in enumerate(steps[:-1], start=1):
        result = compose(step, result)
        if goal(result):
            return rounds * len(steps) + layer
    return (rounds + 1) * len(steps)


def _most(masks: Masks, needed: Callable[[Element], int | None]) -> int | None:
    """The most layers that any batch element needs; None if one never meets the goal."""
    every = checked(masks)
    check_size(every)
    found = [needed(element) for element in dict.fromkeys(elements(every))]
    return None if None in found else max(value for value in found if value is not None)
