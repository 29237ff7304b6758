"""Causal patterns by name, one for each layer, optionally different for groups of heads.

dense                        every layer sees all earlier tokens
local|butterfly              the union of two patterns
local,local,dense            alternating layers: two with a window, one dense, and so on
local/butterfly              equal groups of heads: the first half with a window, the others with a butterfly
"""

from __future__ import annotations

from functools import reduce
from operator import or_

from sparseflash import BlockMask, masks

NAMES = ("dense", "local", "butterfly", "bigbird")


def build(name: str, length: int, *, window: int, block: int) -> BlockMask:
    """The causal mask of one name over `length` tokens, on the CPU.

    >>> build("local", 512, window=128, block=64)
    BlockMask(512 x 512, blocks of 64, 21 tiles: 7 full + 14 partial (2 distinct), density 21.9 %)

    window: in tokens, the query included; a window longer than the text is dense. Raises ValueError for other names.
    """
    if name == "dense" or (name == "local" and window >= length):
        return masks.causal(length, block=block)
    if name == "local":
        return masks.local(length, window=window, causal=True, block=block)
    if name == "butterfly":
        return masks.butterfly(length, causal=True, block=block)
    if name == "bigbird":
        blocks = -(-length // block)
        return masks.deepspeed_bigbird(length, causal=True, block=block, random_blocks=min(3, blocks))
    raise ValueError(f"a pattern must be made of {', '.join(NAMES)} with | , and / between them; got {name!r}")


def of_layer(text: str, heads: int, length: int, *, window: int, block: int) -> BlockMask:
    """The mask of one layer, such as "local|butterfly" or "local/dense"; with one head if all heads are equal."""
    groups = [
        reduce(or_, (build(name.strip(), length, window=window, block=block) for name in group.split("|")))
        for group in text.split("/")
    ]
    if len(groups) == 1:
        return groups[0]
    if heads % len(groups):
        raise ValueError(
            f"the heads, {heads}, must be a multiple of the {len(groups)} groups of the pattern {text!r}; add or leave "
            "out a group"
        )
    return masks.per_head([mask for mask in groups for _ in range(heads // len(groups))])


def of_layers(text: str, depth: int, heads: int, length: int, *, window: int, block: int) -> list[BlockMask]:
    """The masks of all layers. Layers with one pattern share one mask object and its plans.

    >>> first, second, third = of_layers("local,dense", 3, 4, 256, window=64, block=32)
    >>> first is third, second.density > first.density
    (True, True)
    """
    names = [name.strip() for name in text.split(",")]
    made = {name: of_layer(name, heads, length, window=window, block=block) for name in dict.fromkeys(names)}
    return [made[names[layer % len(names)]] for layer in range(depth)]
