"""Which keys can influence a query through several layers, and how many layers it takes until all can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice

from sparseflash.analysis import bitrows
from sparseflash.analysis.relation import Relation, compose, of_walks, tiles_of
from sparseflash.analysis.walks import walk
from sparseflash.blockmask import BlockMask
from sparseflash.building import Part
from sparseflash.checks import integer

MOST_BLOCKS = 1 << 15  # a bit matrix of the tile graph then takes 128 MB
MOST_TILES = 1 << 24

Masks = BlockMask | Sequence[BlockMask]


def reach(masks: Masks, layers: int | None = None) -> BlockMask:
    """The keys that a query can be influenced by after `layers` layers of attention with residual connections.

    `masks`: one mask for every layer, or one a layer, first layer first; a list that is shorter than `layers` is
    repeated. `layers` defaults to one for each mask given. With `M_l` the mask of layer l as a boolean matrix, heads
    united (a token is influenced through any of them), and `I` the identity that the residual connection adds, this is
    the boolean product

        R = (M_L or I) (M_(L-1) or I) ... (M_1 or I)

    so `R[q, k]` says whether input token k can change what token q holds after the last layer. 0 layers give the
    identity. Exact on tokens: where tiles are full, or their rows and columns all hold something, the tile graph
    decides; elsewhere bits are multiplied, once for each distinct pair of tiles.

    The result has one head, square blocks of the smallest `block_q` or `block_k` of the masks, a pattern for each batch
    element if the masks have them, and no `lengths`: padding neither reaches nor is reached.

    Raises ValueError for `q_len != k_len`, for masks of different lengths or batch sizes, and where the result would
    have over 16.7 million tiles or the masks over 32,768 block rows: larger blocks are the remedy, and
    `layers_to_full_reach` needs no result.

    >>> step = BlockMask.from_function(lambda q, k: (q - k).abs() <= 1, 64, block=16)
    >>> reach(step, 3) == BlockMask.from_function(lambda q, k: (q - k).abs() <= 3, 64, block=16)
    True
    """
    every = _checked(masks)
    layers = len(every) if layers is None else integer(layers, "layers", "layers")
    if layers < 0:
        raise ValueError(f"layers must not be negative; got {layers}.")
    parts: list[Part] = []
    found: dict[object, Part] = {}
    block, length = _block(every), every[0].q_len
    for element in _elements(every):
        if element.key not in found:
            relation = _after(element, layers)
            count = bitrows.count(relation.full, relation.count) + len(relation.key)
            if count > MOST_TILES:
                raise ValueError(
                    f"the result must have at most {MOST_TILES} tiles; got {count} tiles of {block} x {block}. Give "
                    "masks with larger blocks; layers_to_full_reach and diameter have no such limit."
                )
            found[element.key] = tiles_of(relation, element.stop)
        parts.append(found[element.key])
    return BlockMask._of(length, length, block, block, parts, len(parts), 1)


def layers_to_full_reach(masks: Masks, *, causal: bool = False) -> int | None:
    """The least number of layers after which every query is influenced by every key; None if that never happens.

    `masks` as in `reach`; a list is repeated as often as it takes. `causal=True` asks only for the keys up to the
    query's own position. With patterns for batch elements, or lengths, the most layers that an element needs. Raises
    ValueError as `reach` does, except for large results.

    >>> import torch
    >>> i, j = torch.arange(8)[:, None], torch.arange(8)
    >>> butterfly = sum((i ^ j) == stride for stride in (0, 1, 2, 4)).bool()
    >>> layers_to_full_reach(BlockMask.from_layout(butterfly))
    3
    >>> layers_to_full_reach(BlockMask.from_layout(butterfly.tril()), causal=True) is None  # never, at any depth
    True
    """
    goal = Relation.is_causally_everything if causal else Relation.is_everything

    def needed(element: _Element) -> int | None:
        last, powers = _powers(element, goal)
        return _first(element, powers, goal) if goal(last) else None

    return _most(masks, needed)


def diameter(masks: Masks) -> int:
    """The number of layers after which nothing more is reached: the longest of the shortest paths that there are.

    Where every query is influenced by every key in the end, that is `layers_to_full_reach`. `masks` as there.

    >>> import torch
    >>> i, j = torch.arange(8)[:, None], torch.arange(8)
    >>> butterfly = sum((i ^ j) == stride for stride in (0, 1, 2, 4)).bool()
    >>> diameter(BlockMask.from_layout(butterfly.tril()))
    3
    """

    def needed(element: _Element) -> int:
        last, powers = _powers(element, lambda relation: False)
        return _first(element, powers, last.__eq__)

    return _most(masks, needed) or 0


class _Element:
    """What one batch element's tokens see in each of the layers."""

    def __init__(self, masks: Sequence[BlockMask], patterns: tuple[tuple[int, ...], ...], stop: int) -> None:
        self.key = patterns, stop
        self.stop = stop
        self._masks, self._patterns = masks, patterns
        self._steps: dict[tuple[int, tuple[int, ...]], Relation] = {}

    def steps(self) -> list[Relation]:
        """One relation a layer, the residual connection included."""
        return [self._step(mask, patterns) for mask, patterns in zip(self._masks, self._patterns, strict=True)]

    def _step(self, mask: BlockMask, patterns: tuple[int, ...]) -> Relation:
        key = id(mask), patterns  # layers often share a mask
        if key not in self._steps:
            found = (walk(mask, pattern, self.stop) for pattern in patterns)
            self._steps[key] = of_walks(found, _block(self._masks), self.stop)
        return self._steps[key]

    def nothing(self) -> Relation:
        """No layer at all: the identity."""
        return of_walks([], _block(self._masks), self.stop)


def _checked(masks: Masks) -> list[BlockMask]:
    """The masks of the layers, on the CPU."""
    every = [masks] if isinstance(masks, BlockMask) else list(masks)
    if not every or not all(isinstance(mask, BlockMask) for mask in every):
        raise TypeError(f"masks must be a BlockMask or a sequence of one or more; got {masks!r}.")
    on_cpu: dict[int, BlockMask] = {id(mask): mask.to("cpu") for mask in every}
    every = [on_cpu[id(mask)] for mask in every]
    for mask in every:
        if mask.q_len != mask.k_len:
            raise ValueError(
                f"masks must have as many queries as keys, for a layer's output to be the next one's input; "
                f"got {mask.q_len} x {mask.k_len}."
            )
        if mask.q_len != every[0].q_len:
            raise ValueError(f"masks must have one length; got {every[0].q_len} and {mask.q_len} tokens.")
        if mask.shape[0] == 0:
            raise ValueError("masks must have at least one batch element; got lengths of none.")
    batches = {mask.shape[0] for mask in every} - {1}
    if len(batches) > 1:
        raise ValueError(f"masks must have one batch size, or 1; got {' and '.join(map(str, sorted(batches)))}.")
    lengths = {tuple(mask.lengths.tolist()) for mask in every if mask.lengths is not None}
    if len(lengths) > 1:
        raise ValueError("masks must have the same lengths, or none; got different ones.")
    count = -(-every[0].q_len // _block(every))
    if count > MOST_BLOCKS:
        raise ValueError(
            f"masks must have at most {MOST_BLOCKS} block rows; got {count} of {_block(every)} tokens. "
            "Give masks with larger blocks."
        )
    return every


def _block(masks: Sequence[BlockMask]) -> int:
    return min(min(mask.block_q, mask.block_k) for mask in masks)


def _elements(masks: Sequence[BlockMask]) -> list[_Element]:
    """One entry a batch element; equal ones are the same object."""
    batch = max(mask.shape[0] for mask in masks)
    lengths = next((mask.lengths for mask in masks if mask.lengths is not None), None)
    stops = [masks[0].q_len] * batch if lengths is None else lengths.expand(batch).tolist()
    patterns = [mask.pattern.expand(batch, -1).tolist() for mask in masks]
    found: dict[object, _Element] = {}
    elements = []
    for b in range(batch):
        used = tuple(tuple(sorted(set(rows[b]))) for rows in patterns)
        elements.append(found.setdefault((used, stops[b]), _Element(masks, used, stops[b])))
    return elements


def _after(element: _Element, layers: int) -> Relation:
    """What is reached after so many layers."""
    steps = element.steps()
    if len(steps) == 1:
        return _power(steps[0], layers) if layers else element.nothing()
    result = element.nothing()
    for step in islice(cycle(steps), layers):
        result = compose(step, result)
    return result


def _power(step: Relation, exponent: int) -> Relation:
    """`step` to a positive power, by squaring; once nothing changes, nothing ever does."""
    result = step
    for bit in bin(exponent)[3:]:
        squared = compose(result, result)
        following = compose(step, squared) if bit == "1" else squared
        if following == result:
            return result
        result = following
    return result


def _powers(element: _Element, goal: Callable[[Relation], bool]) -> tuple[Relation, list[Relation]]:
    """`T, T^2, T^4, ...` of the whole list of layers T, up to the first that meets the goal or changes nothing.

    That last one is returned apart. A goal must be kept by all larger relations.
    """
    power = element.nothing()
    for step in element.steps():
        power = compose(step, power)
    powers: list[Relation] = []
    while not goal(power):
        squared = compose(power, power)
        if squared == power:
            break
        powers.append(power)
        power = squared
    return power, powers


def _first(element: _Element, powers: list[Relation], goal: Callable[[Relation], bool]) -> int:
    """The least number of layers that meets the goal, which the power after the last of `powers` does."""
    steps = element.steps()
    result, layers = element.nothing(), 0
    # Reach only grows with layers. The most rounds that do not meet the goal, as a binary number ...
    for exponent in reversed(range(len(powers))):
        longer = compose(powers[exponent], result)
        if not goal(longer):
            result, layers = longer, layers + (len(steps) << exponent)
    # ... and the layers of the round that does.
    for step in cycle(steps):
        if goal(result):
            return layers
        result, layers = compose(step, result), layers + 1
    raise AssertionError("a cycle of layers does not end")


def _most(masks: Masks, needed: Callable[[_Element], int | None]) -> int | None:
    """The most layers that a batch element needs; None if one is never done."""
    found: dict[object, int | None] = {}
    for element in _elements(_checked(masks)):
        if element.key not in found:
            found[element.key] = needed(element)
    return None if None in found.values() else max(value for value in found.values() if value is not None)
