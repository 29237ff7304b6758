"""Hypothesis strategies for masks, every size bounded by a parameter.

A drawn mask is a recipe: its repr, pasted into a test after `from tests.drawn.masks import *`, builds it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from sparseflash import BlockMask, masks

TILES = ("full", "random", "dead", "lower", "upper", "repeated", "single")
HOLES = ("none", "rows", "columns", "both")
RULES = ("near", "far", "documents", "strided", "queries", "keys", "nothing")
SEEDS = st.integers(0, 2**31 - 1)


# ---------------------------------------------------------------------- sizes


def blocks(values: Sequence[int] = (16, 32, 64)) -> SearchStrategy[tuple[int, int]]:
    """`(block_q, block_k)`, as often rectangular as not."""
    square = st.sampled_from(values).map(lambda block: (block, block))
    return square | st.tuples(st.sampled_from(values), st.sampled_from(values))


_blocks = blocks


def lengths(most: int, block: int = 16) -> SearchStrategy[int]:
    """Half of them awkward: 1, whole blocks, one more and one less."""
    edges = {multiple + step for multiple in range(0, most + 2, block) for step in (-1, 0, 1)}
    return st.sampled_from(sorted(edge for edge in edges if 1 <= edge <= most)) | st.integers(1, most)


# ---------------------------------------------------------------------- dense masks


def dense_mask(
    *,
    q_len: int,
    k_len: int,
    block: tuple[int, int],
    patterns: Sequence[Sequence[str]],
    heads: Sequence[Sequence[int]],
    holes: str,
    seed: int,
) -> Tensor:
    """`patterns`: the kinds of tile of each pattern; `heads[b][h]`: the pattern of head h of batch element b."""
    rng = np.random.default_rng(seed)
    made = np.stack([_one_pattern(rng, q_len, k_len, block, kinds, holes) for kinds in patterns])
    return torch.from_numpy(made[np.array(heads)])


def _one_pattern(
    rng: np.random.Generator, q_len: int, k_len: int, block: tuple[int, int], kinds: Sequence[str], holes: str
) -> np.ndarray:
    block_q, block_k = block
    rows, cols = -(-q_len // block_q), -(-k_len // block_k)
    single = np.zeros(block, dtype=bool)
    single[rng.integers(block_q), rng.integers(block_k)] = True
    every = np.ones(block, dtype=bool)
    of_kind = {
        "dead": ~every, "full": every, "random": every, "lower": np.tril(every), "upper": np.triu(every, 1),
        "repeated": rng.random(block) < 0.3, "single": single,
    }  # fmt: skip
    which = rng.integers(len(kinds), size=(rows, cols))
    grid = np.stack([of_kind[kind] for kind in kinds])[which]
    is_random = np.array([kind == "random" for kind in kinds])[which]
    grid[is_random] = rng.random((is_random.sum(), block_q, block_k)) < rng.choice([0.05, 0.5, 0.95])
    dense = grid.transpose(0, 2, 1, 3).reshape(rows * block_q, cols * block_k)[:q_len, :k_len].copy()
    if holes in ("rows", "both"):
        dense[_hole(rng, q_len, block_q)] = False
    if holes in ("columns", "both"):
        dense[:, _hole(rng, k_len, block_k)] = False
    return dense


def _hole(rng: np.random.Generator, length: int, block: int) -> np.ndarray:
    chosen = rng.random(length) < 0.1
    start = rng.integers(length)
    chosen[start : start + rng.integers(1, 2 * block + 1)] = True
    return chosen


def _leading(size: int) -> SearchStrategy[int]:
    return st.sampled_from([size, size, 1])


@st.composite
def _dense_arguments(
    draw: DrawFn, q_len: int, k_len: int, batch: int, heads: int, block: tuple[int, int]
) -> dict[str, Any]:
    rows, cols = draw(_leading(batch)), draw(_leading(heads))
    patterns = min(draw(st.sampled_from([1, 2, 2, 3])), rows * cols)
    uses = st.lists(st.integers(0, patterns - 1), min_size=cols, max_size=cols)
    kinds = st.lists(st.sampled_from(TILES), min_size=1, max_size=5)
    return {
        "q_len": q_len,
        "k_len": k_len,
        "block": block,
        "patterns": draw(st.lists(kinds, min_size=patterns, max_size=patterns)),
        "heads": draw(st.lists(uses, min_size=rows, max_size=rows)),
        "holes": draw(st.sampled_from(HOLES)),
        "seed": draw(SEEDS),
    }


def dense_masks(q_len: int, k_len: int, batch: int, heads: int, block: tuple[int, int]) -> SearchStrategy[Tensor]:
    """Bool `[B or 1, H or 1, Nq, Nk]`."""
    return _dense_arguments(q_len, k_len, batch, heads, block).map(lambda drawn: dense_mask(**drawn))


# ---------------------------------------------------------------------- block masks


def rule(name: str, number: int) -> Callable[[Tensor, Tensor], Tensor]:
    return {
        "near": lambda q, k: (q - k).abs() < number,
        "far": lambda q, k: (q - k).abs() >= number,
        "documents": lambda q, k: (q // number == k // number) & (k <= q),
        "strided": lambda q, k: (q + 3 * k) % number == 0,
        "queries": lambda q, k: q % number == 0,
        "keys": lambda q, k: k % number == 0,
        "nothing": lambda q, k: (q < 0) & (k < 0),
    }[name]


def _from_dense(*, block: tuple[int, int], **arguments: Any) -> BlockMask:
    return BlockMask.from_dense(dense_mask(block=block, **arguments), block=block)


def _from_layout(
    *, q_len: int, k_len: int, block: tuple[int, int], heads: Sequence[Sequence[int]], share: float, seed: int
) -> BlockMask:
    rows, cols = -(-q_len // block[0]), -(-k_len // block[1])
    rng = np.random.default_rng(seed)
    made = rng.random((1 + max(map(max, heads)), rows, cols)) < share
    return BlockMask.from_layout(made[np.array(heads)], block=block, q_len=q_len, k_len=k_len)


def _from_function(*, q_len: int, k_len: int, block: tuple[int, int], rule_name: str, number: int) -> BlockMask:
    return BlockMask.from_function(rule(rule_name, number), q_len, k_len, block=block)


def _documents(*, q_len: int, k_len: int, block: tuple[int, int], cuts: Sequence[int], causal: bool) -> BlockMask:
    ends = [sorted(cut * length // 1000 for cut in cuts) for length in (q_len, k_len)]
    lengths = [np.diff([0, *inner, length]) for inner, length in zip(ends, (q_len, k_len))]
    return masks.documents(*lengths, causal=causal, block=block)


def _vertical_slash(
    *, q_len: int, k_len: int, block: tuple[int, int], heads: int, verticals: int, slashes: int, seed: int
) -> BlockMask:
    rng = np.random.default_rng(seed)
    vertical, slash = (rng.integers(0, q_len, (heads, count)) for count in (verticals, slashes))
    return masks.vertical_slash(q_len, vertical=vertical, slash=slash, block=block)


def _neighborhood(*, q_len: int, k_len: int, block: tuple[int, int], width: int, **arguments: Any) -> BlockMask:
    shape = (q_len // width, width)
    tiled = arguments.pop("tiled")
    order = masks.order.tiles(shape, 4) if tiled else None
    return masks.neighborhood(shape, **arguments, edges="crop", order=order, block=block)


BUILDERS: dict[str, Callable[..., BlockMask]] = {
    "from_dense": _from_dense,
    "from_layout": _from_layout,
    "from_function": _from_function,
    "dense": BlockMask.dense,
    "causal": masks.causal,
    "local": masks.local,
    "butterfly": masks.butterfly,
    "documents": _documents,
    "streaming": masks.streaming,
    "vertical_slash": _vertical_slash,
    "neighborhood": _neighborhood,
    "deepspeed_bigbird": masks.deepspeed_bigbird,
}
SELF = ("local", "butterfly", "streaming", "vertical_slash", "neighborhood", "deepspeed_bigbird")
SQUARE = ("butterfly", "deepspeed_bigbird")


@dataclass(frozen=True)
class Recipe:
    builder: str
    arguments: dict[str, Any]
    lengths: tuple[int, ...] | tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def mask(self) -> BlockMask:
        mask = BUILDERS[self.builder](**self.arguments)
        if self.lengths is None:
            return mask
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        if lengths.ndim == 1:
            return mask.with_lengths(lengths)
        return mask.with_lengths(q_lengths=lengths[0], k_lengths=lengths[1])


@st.composite
def recipes(
    draw: DrawFn, most_tokens: int, blocks: Sequence[int], batch: int = 1, heads: int = 1, apart: bool = False
) -> Recipe:  # fmt: skip
    # from_dense first and twice: failures shrink towards it.
    builder = draw(st.sampled_from(["from_dense", *BUILDERS]))
    block = draw(_blocks(blocks))
    if builder in SQUARE:
        block = (block[0], block[0])
    q_len = draw(lengths(most_tokens, block[0]))
    width = 1
    if builder == "neighborhood":
        width = draw(st.integers(1, q_len))
        q_len -= q_len % width
    k_len = q_len
    if builder not in SELF:
        k_len = draw(st.just(q_len) | lengths(most_tokens, block[1]))
    sizes = {"q_len": q_len, "k_len": k_len, "block": block}
    if builder == "from_dense":
        arguments = draw(_dense_arguments(q_len, k_len, batch, heads, block))
    elif builder == "from_layout":
        rows, cols = draw(_leading(batch)), draw(_leading(heads))
        uses = st.lists(st.integers(0, 2), min_size=cols, max_size=cols)
        share = draw(st.sampled_from([0.5, 0.0, 0.1, 1.0]))
        uses = draw(st.lists(uses, min_size=rows, max_size=rows))
        arguments = sizes | {"heads": uses, "share": share, "seed": draw(SEEDS)}
    elif builder == "from_function":
        arguments = sizes | {"rule_name": draw(st.sampled_from(RULES)), "number": draw(lengths(most_tokens, block[1]))}
    elif builder == "local":
        window = draw(lengths(2 * most_tokens, block[1]))
        arguments = {"q_len": q_len, "window": window, "causal": draw(st.booleans()), "block": block}
    elif builder == "butterfly":
        most = (-(-q_len // block[0]) - 1).bit_length()
        factors = draw(st.none() | st.integers(0, most))
        arguments = {"q_len": q_len, "block": block[0], "factors": factors, "causal": draw(st.booleans())}
    elif builder == "documents":
        cuts = draw(st.lists(st.integers(0, 1000), max_size=4))
        arguments = sizes | {"cuts": cuts, "causal": draw(st.booleans())}
    elif builder == "streaming":
        window, sink = draw(lengths(most_tokens, block[1])), draw(st.integers(0, most_tokens))
        arguments = {"q_len": q_len, "window": window, "sink": sink, "block": block}
    elif builder == "vertical_slash":
        counts = {"verticals": draw(st.integers(0, 4)), "slashes": draw(st.integers(0, 4))}
        arguments = sizes | {"heads": draw(_leading(heads)), **counts, "seed": draw(SEEDS)}
    elif builder == "neighborhood":
        window = draw(st.integers(1, 9))
        more = {
            "stride": draw(st.integers(1, window)),
            "dilation": draw(st.integers(1, 2)),
            "tiled": draw(st.booleans()),
        }
        arguments = sizes | {"width": width, "window": window, **more}
    elif builder == "deepspeed_bigbird":
        count = -(-q_len // block[0])
        numbers = {
            name: draw(st.integers(0, min(3, count))) for name in ("random_blocks", "window_blocks", "global_blocks")
        }
        arguments = {"q_len": q_len, "block": block[0], "heads": draw(_leading(heads)), **numbers}
        arguments |= {"causal": draw(st.booleans()), "seed": draw(SEEDS)}
    else:
        arguments = sizes
    longest = max(q_len, k_len)
    one = st.sampled_from([q_len, k_len, 0, longest + 7]) | st.integers(0, longest)
    given = st.lists(one, min_size=batch, max_size=batch).map(tuple)
    if apart or q_len != k_len:
        given = given | st.tuples(given, given)
    return Recipe(builder, arguments, draw(st.none() | st.none() | given))


def block_masks(
    most_tokens: int = 160, blocks: Sequence[int] = (16, 32, 64), batch: int = 1, heads: int = 1
) -> SearchStrategy[BlockMask]:
    """Masks of every constructor and of the library, now and then with lengths."""
    return recipes(most_tokens, blocks, batch, heads).map(Recipe.mask)
