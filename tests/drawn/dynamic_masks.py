from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from sparseflash import BlockMask
from sparseflash.blockmask import bitmask
from tests.drawn.masks import SEEDS, Recipe
from tests.drawn.problems import problems


def made_dynamic(mask, seed):
    """The same scores with split, shuffled and unused patterns, dead and repeated tiles, and capacity left."""
    rng = np.random.default_rng(seed)
    row_blocks, col_blocks = mask.blocks
    indptr, indices, tile = (x.numpy() for x in (mask.indptr, mask.indices, mask.tile))
    patterns = (len(indptr) - 1) // row_blocks

    words = mask.bits.numpy()
    whole = np.int32(bitmask.full_word(mask.block_k))
    unused = rng.integers(-(2**31), 2**31, (2, *words.shape[1:]), dtype=np.int32) & whole
    pool = [np.zeros_like(unused[:1]), np.full_like(unused[:1], whole), words, words, words[: rng.integers(4)], unused]
    kinds = [-1, 0, *range(1, len(words) + 1), *range(1, len(words) + 1), *range(1, 1 + len(pool[4])), -2, -2]
    order = rng.permutation(len(kinds))
    bits, kinds = np.concatenate(pool)[order], np.array(kinds)[order]

    def number(kind):
        choices = [*(1 + np.flatnonzero(kinds == kind)), *([0] if kind == 0 else [])]
        return rng.choice(choices)

    source = rng.permutation([*range(patterns), *rng.integers(patterns, size=rng.integers(1, 4))])
    pattern = [rng.choice(np.flatnonzero(source == p)) for p in mask.pattern.numpy().reshape(-1)]
    starts, cols, numbers = [0], [], []
    for p in source:
        for row in range(p * row_blocks, (p + 1) * row_blocks):
            held = {j: number(t) for j, t in zip(*(x[indptr[row] : indptr[row + 1]] for x in (indices, tile)))}
            dead = [j for j in range(col_blocks) if j not in held and rng.random() < 0.3]
            held |= {j: number(-1) for j in dead}
            cols += sorted(held)
            numbers += [held[j] for j in sorted(held)]
            starts.append(len(cols))
    room = rng.integers(5)
    cols += [*rng.integers(col_blocks, size=room)]
    numbers += [*rng.integers(len(bits) + 1, size=room)]
    starts, cols, numbers, pattern = (
        torch.from_numpy(np.array(x, dtype=np.int32)) for x in (starts, cols, numbers, pattern)
    )
    return BlockMask(
        mask.q_len, mask.k_len, mask.block_q, mask.block_k, starts, cols, numbers, torch.from_numpy(bits.copy()),
        pattern.view(mask.pattern.shape), mask.lengths, dynamic=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Loosened:
    recipe: Recipe
    seed: int

    def mask(self):
        return made_dynamic(self.recipe.mask(), self.seed)


def dynamic_problems(**sizes):
    drawn = problems(value_dims=(16,), **sizes).filter(lambda problem: problem.recipe is not None)
    return st.builds(lambda p, seed: replace(p, recipe=Loosened(p.recipe, seed)), drawn, SEEDS)
