"""Causal patterns by name, one for each layer, optionally different for groups of heads.

dense                        every layer sees all earlier tokens
local|butterfly              the union of two patterns
local,local,dense            alternating layers: two with a window, one dense, and so on
local/butterfly              equal groups of heads: the first half with a window, the others with a butterfly
moba, msa, nsa               blocks that each query chooses at every step, as many tokens as the window has
streaming(n, window=64, sink=4)    a pattern of the library, where n is the number of tokens
folder/mine.py:rule          any rule(q, k), or a function of n that returns a mask

Keys after their query are dropped.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

from experiments.lm.model.chosen import KINDS, ChosenBlocks
from sparseflash import BlockMask, masks
from sparseflash.cli.pattern_text import groups, mask_of_pattern, parts

NAMES = ("dense", "local", "butterfly", "bigbird")


def build(name: str, length: int, *, window: int, block: int, heads: int = 1) -> BlockMask:
    """The causal mask of one pattern over `length` tokens, on the CPU.

    >>> build("local", 512, window=128, block=64)
    BlockMask(512 x 512, blocks of 64, 21 tiles: 7 full + 14 partial (2 distinct), density 21.9 %)

    window: of "local", in tokens, the query included. heads: that a rule distinguishes.
    """
    named = {
        "dense": lambda: masks.causal(length, block=block),
        "local": lambda: (
            masks.local(length, window=window, causal=True, block=block)
            if window < length
            else masks.causal(length, block=block)
        ),
        "butterfly": lambda: masks.butterfly(length, causal=True, block=block),
        "bigbird": lambda: masks.deepspeed_bigbird(
            length, causal=True, block=block, random_blocks=min(3, -(-length // block))
        ),
    }
    mask = mask_of_pattern(name, length, block=block, named=named, heads=heads)
    return mask if name in named else mask & masks.causal(length, block=(mask.block_q, mask.block_k))


def of_layer(text: str, heads: int, length: int, *, window: int, block: int) -> BlockMask:
    by_head = groups(text, NAMES)
    if heads % len(by_head):
        raise ValueError(
            f"the heads, {heads}, must be a multiple of the {len(by_head)} groups of the pattern {text!r}; add or "
            "leave out a group"
        )
    of_group = heads // len(by_head)
    made = [
        reduce(or_, (build(one, length, window=window, block=block, heads=of_group) for one in parts(group, "|")))
        for group in by_head
    ]
    if len(made) == 1:
        return made[0]
    return masks.per_head([mask.select(heads=head if mask.shape[1] > 1 else 0)
                           for mask in made for head in range(of_group)])  # fmt: skip


def has_choices(text: str) -> bool:
    return not set(KINDS).isdisjoint(parts(text, ","))


def chosen(length: int, *, window: int, block: int, kind: str = "moba") -> ChosenBlocks:
    """A layer that chooses blocks of `block` tokens, as many as a window has.

    >>> chosen(512, window=128, block=32).chosen
    4
    """
    if length % block:
        raise ValueError(f"the pattern {kind} needs a context of whole blocks of {block} tokens; got {length}")
    return ChosenBlocks(length, block, max(1, window // block), kind)


def of_layers(
    text: str, depth: int, heads: int, length: int, *, window: int, block: int
) -> list[BlockMask | ChosenBlocks]:
    """Layers with one pattern share one mask object and its plans.

    >>> first, second, third = of_layers("local,dense", 3, 4, 256, window=64, block=32)
    >>> first is third, second.density > first.density
    (True, True)
    """
    names = parts(text, ",")
    made: dict[str, BlockMask | ChosenBlocks] = {}
    for name in dict.fromkeys(names):
        of_one = chosen(length, window=window, block=block, kind=name) if name in KINDS else None
        made[name] = of_one or of_layer(name, heads, length, window=window, block=block)
    return [made[names[layer % len(names)]] for layer in range(depth)]
