import importlib
from unittest import mock

import torch
from hypothesis import strategies as st

from sparseflash import BlockMask, masks
from sparseflash.masks import fused
from tests.drawn.masks import blocks, lengths

antidiagonal = importlib.import_module("sparseflash.masks.antidiagonal_scores")

MOST = 150
BLOCKS = (16, 32, 64)

# Triton's interpreter runs the kernels here.
WAYS = st.sampled_from(["operations", "kernels"])
INTEGERS = st.sampled_from(
    [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8]
)


def by(way):
    return mock.patch.object(fused, "_DEVICES", ["cpu"] if way == "kernels" else [])


def generator(seed):
    return torch.Generator().manual_seed(seed)


def coarse(shape, seed):
    scores = torch.randint(0, 4, shape, generator=generator(seed)).float()
    special = torch.rand(shape, generator=generator(seed + 1))
    scores[special < 0.15] = -torch.inf
    scores[special < 0.05] = torch.nan
    scores[special > 0.95] = torch.inf
    return scores


def distinct(shape, seed):
    return torch.randn(shape, generator=generator(seed))


def tokens_of(layout, q_len, k_len, block):
    i, j = torch.arange(q_len) // block[0], torch.arange(k_len) // block[1]
    return layout[..., i[:, None], j]


def causal_tokens(q_len, k_len):
    return torch.arange(k_len) <= torch.arange(q_len)[:, None] + (k_len - q_len)


def tiles_with(live, block):
    (q_len, k_len), (block_q, block_k) = live.shape, block
    rows = [live[i : i + block_q] for i in range(0, q_len, block_q)]
    return torch.tensor([[bool(r[:, j : j + block_k].any()) for j in range(0, k_len, block_k)] for r in rows])


def assert_keeps(mask, live, block):
    assert mask.dynamic
    mask.validate()
    assert mask.shape == live.shape
    wrong = (mask.to_dense() != live).nonzero()
    assert len(wrong) == 0, f"differs first at (b, h, q, k) = {wrong[0].tolist()}"
    assert mask == BlockMask.from_dense(live, block=block)


@st.composite
def sizes(draw):
    block = draw(blocks(BLOCKS))
    q_len = draw(lengths(MOST, block[0]))
    k_len = draw(st.just(q_len) | lengths(MOST, block[1]))
    return q_len, k_len, block


def blocks_of(q_len, k_len, block):
    return -(-q_len // block[0]), -(-k_len // block[1])


def as_four(x):
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


BUILD = {
    "top-k": lambda s, **a: masks.top_k_blocks(s, k=2, **a),
    "mass": lambda s, **a: masks.mass_blocks(s, mass=0.6, **a),
}

SCORES = torch.zeros(4, 4)
