"""The layers of a model as each batch element sees them: the input of reach and lint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sparseflash.analysis.relation import Relation, of_walks
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import described
from sparseflash.blockmask.stats import live_tokens
from sparseflash.blockmask.walks import Walk, walk

MOST_BLOCKS = 1 << 15  # the bit matrix of the tile graph then takes 128 MB

Masks = BlockMask | Sequence[BlockMask]


class Element:
    """The relations between the tokens of one batch element, layer by layer."""

    def __init__(self, masks: Sequence[BlockMask], patterns: tuple[tuple[int, ...], ...], stop: int) -> None:
        self.stop = stop
        self._masks, self._patterns = masks, patterns
        self._steps: dict[tuple[int, tuple[int, ...]], Relation] = {}

    def steps(self) -> list[Relation]:
        return [self._step(mask, patterns) for mask, patterns in zip(self._masks, self._patterns, strict=True)]

    def _step(self, mask: BlockMask, patterns: tuple[int, ...]) -> Relation:
        key = id(mask), patterns
        if key not in self._steps:
            found = (walk(mask, pattern, (self.stop, self.stop)) for pattern in patterns)
            self._steps[key] = of_walks(found, block_of(self._masks), self.stop)
        return self._steps[key]

    def walks(self) -> Iterator[Walk]:
        seen = set()
        for mask, patterns in zip(self._masks, self._patterns, strict=True):
            for pattern in patterns:
                if (id(mask), pattern) not in seen:
                    seen.add((id(mask), pattern))
                    yield walk(mask, pattern, (self.stop, self.stop))

    def union(self) -> Relation:
        return of_walks(self.walks(), block_of(self._masks), self.stop)

    def nothing(self) -> Relation:
        return of_walks([], block_of(self._masks), self.stop)


def listed(masks: Masks) -> list[BlockMask]:
    """The masks of the layers; there must be at least one."""
    every = list(masks) if isinstance(masks, Iterable) else [masks]
    if not every or not all(isinstance(mask, BlockMask) for mask in every):
        got = masks if isinstance(masks, list | tuple) else described(masks)
        raise TypeError(f"masks must be a BlockMask or a sequence of one or more; got {got}.")
    return every


def checked(masks: Masks) -> list[BlockMask]:
    """The masks of the layers, on the CPU."""
    every = listed(masks)
    on_cpu: dict[int, BlockMask] = {id(mask): mask.canonical().to("cpu") for mask in every}
    every = [on_cpu[id(mask)] for mask in every]
    for mask in every:
        if mask.q_len != mask.k_len:
            raise ValueError(
                f"masks must have as many queries as keys, because a layer's output is the next layer's input; "
                f"got {mask.q_len} x {mask.k_len}."
            )
        if mask.q_len != every[0].q_len:
            raise ValueError(f"masks must have one length; got {every[0].q_len} and {mask.q_len} tokens.")
        if mask.shape[0] == 0:
            raise ValueError("masks must have at least one batch element; got lengths of no sequence.")
    batches = {mask.shape[0] for mask in every} - {1}
    if len(batches) > 1:
        raise ValueError(f"masks must have one batch size, or 1; got {' and '.join(map(str, sorted(batches)))}.")
    lengths = {tuple(live_tokens(mask)) for mask in every if mask.lengths is not None}
    if any(q != k for tokens in lengths for q, k in tokens):
        raise ValueError("masks must have one length for queries and keys, as all layers see the same tokens.")
    if len(lengths) > 1:
        raise ValueError("masks must have the same lengths, or none; got different ones.")
    return every


def check_size(masks: Sequence[BlockMask]) -> None:
    """Raises ValueError if the bit matrix of the tile graph would be too large."""
    count = -(-masks[0].q_len // block_of(masks))
    if count > MOST_BLOCKS:
        raise ValueError(
            f"masks must have at most {MOST_BLOCKS} block rows; got {count} of {block_of(masks)} tokens. "
            "Pass masks with larger blocks."
        )


def block_of(masks: Sequence[BlockMask]) -> int:
    """The square block, in tokens, that divides the blocks of all these masks."""
    return min(min(mask.block_q, mask.block_k) for mask in masks)


def elements(masks: Sequence[BlockMask]) -> list[Element]:
    """One entry per batch element; equal ones are the same object."""
    batch = max(mask.shape[0] for mask in masks)
    padded = next((mask for mask in masks if mask.lengths is not None), masks[0])
    stops = [length for length, _ in live_tokens(padded)]
    stops = stops * batch if len(stops) == 1 else stops
    patterns = [mask.pattern.expand(batch, -1).tolist() for mask in masks]
    found: dict[object, Element] = {}
    result = []
    for b in range(batch):
        used = tuple(tuple(sorted(set(rows[b]))) for rows in patterns)
        result.append(found.setdefault((used, stops[b]), Element(masks, used, stops[b])))
    return result
